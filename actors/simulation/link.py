"""The way of messages from one actor to another: each is some time on its way, and none passes an earlier one."""

from __future__ import annotations

import random
from collections.abc import Callable

At = Callable[[float, Callable[[], None]], None]
"""Has something happen at a moment of the run."""


class Link:
    """One ordered channel. Messages on different links may pass each other."""

    def __init__(self, at: At, draw: random.Random, longest_s: float) -> None:
        self._at = at
        self._draw = draw
        self._longest_s = longest_s
        self._last_s = 0.0

    def send(self, now: float, arrive: Callable[[], None]) -> None:
        """Have the message that is sent now arrive."""
        self._last_s = max(self._last_s, now + self._draw.random() * self._longest_s)
        self._at(self._last_s, arrive)
