"""Whether the compute threads have cores of their own.

A step's threads wait for each other hundreds of times, so one that shares its core with another process slows all of them:
steps take several times as long, and nothing else shows why.
"""

from __future__ import annotations

import os

WINDOW_S = 5.0
"""Computation that is looked at together."""

FEWEST_STEPS = 20

SHARE_WANTED = 0.6
"""Of the time of its steps, how much the calling thread should be running; an equal rival on its core leaves it half."""


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def too_many_threads(num_threads: int, cores: int) -> str | None:
    """What is wrong with `num_threads` compute threads on `cores` cores, in words; None if nothing is."""
    if num_threads <= cores:
        return None
    return f"{num_threads} compute threads on {cores} usable cores make steps many times slower; set num_threads lower"


class CoreWatch:
    """Compares how long steps took with how long the calling thread ran meanwhile, and speaks up once."""

    def __init__(self) -> None:
        self._wall_s = 0.0
        self._running_s = 0.0
        self._steps = 0
        self._said = False

    def after_step(self, wall_s: float, running_s: float) -> str | None:
        """Take in a step's duration and the thread's CPU time in it. Returns what is wrong, in words, the first time it is."""
        if self._said:
            return None
        self._wall_s += wall_s
        self._running_s += running_s
        self._steps += 1
        if self._wall_s < WINDOW_S or self._steps < FEWEST_STEPS:
            return None
        share = self._running_s / self._wall_s
        self._wall_s = self._running_s = 0.0
        self._steps = 0
        if share >= SHARE_WANTED:
            return None
        self._said = True
        return (
            f"the compute thread ran for only {share:.0%} of the time of its steps: other processes use its cores; "
            "set num_threads lower, or leave it cores of its own"
        )
