"""The parts of `scripts/bench overlap`."""
