"""The executor for CPUs, in torch."""
