"""Scheduling decisions: pure functions of visible state."""
