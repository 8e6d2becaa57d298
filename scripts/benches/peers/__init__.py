"""The parts of `scripts/bench peers`: installing, running, reckoning, and one driver for each engine."""
