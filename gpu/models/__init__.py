"""Models: where they come from, what they compute."""
