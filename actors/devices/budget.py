"""How often a device may die before the engine gives up, and how long to wait before it is opened again."""

from __future__ import annotations

from collections import deque

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0


class RestartBudget:
    """`max_restarts` deaths within `window_s` seconds are borne, unless a token was gained in between: then it is as new.

    Pure: `now` is the caller's clock.
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._deaths: deque[float] = deque()

    def on_progress(self) -> None:
        """A token was sampled: whatever died before, the engine gets on."""
        self._deaths.clear()

    def on_death(self, now: float) -> float | None:
        """Count a death; return the seconds to wait before the next life, or None when there is none."""
        while self._deaths and now - self._deaths[0] > self._window_s:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > self._max_restarts:
            return None
        return min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (len(self._deaths) - 1))
