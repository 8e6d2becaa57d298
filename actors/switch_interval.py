"""Python's thread switch interval, lowered while anybody needs it.

The setting is the process's, and several engines may live in one process and end in any order: the
first to come lowers it, the last to go sets it back to what it was.
"""

from __future__ import annotations

import sys
import threading

SWITCH_INTERVAL_S = 0.0005


class SwitchInterval:
    """Counts who needs the low interval."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_holders = 0
        self._before_s = 0.0

    def lower(self) -> None:
        """One more needs it. A process that runs with a lower one keeps it."""
        with self._lock:
            if self._num_holders == 0:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._before_s))
            self._num_holders += 1

    def restore(self) -> None:
        """One of those that lowered it has ended."""
        with self._lock:
            self._num_holders -= 1
            if self._num_holders == 0:
                sys.setswitchinterval(self._before_s)


switch_interval = SwitchInterval()
"""The process's one, as the setting is."""
