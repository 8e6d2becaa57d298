"""`scripts/gpu-check`: the GPU part, proved and measured on a machine that has a GPU."""
