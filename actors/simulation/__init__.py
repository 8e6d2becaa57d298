"""The scheduler against a device of numbers, under a clock of its own: no waiting, no chance, any speed."""
