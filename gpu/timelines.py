"""What is complete on a device: the clocks that fences are read from.

Three timelines - steps, copies out, copies in - number their operations and run them in order, each on a
thread of its own. An operation names the last one of each timeline that must be complete before it starts
(`Fences`); its thread waits here. It is complete when it has ended, well or not: what waits for it needs the
memory to be left alone, and learns from elsewhere whether the contents are good.

Nobody waits in a circle, since an operation names only such as were issued before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from msgspec.structs import replace

from ..protocol.messages import Fences

Timeline = Literal["step", "copy_out", "copy_in"]
TIMELINES: tuple[Timeline, ...] = ("step", "copy_out", "copy_in")


class FencesClosedError(Exception):
    """The device is being closed: what is waited for may never happen."""


class Timelines:
    """Which operation was the last to complete on each timeline. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._completed = Fences()
        self._is_closed = False
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        """Threads that wait here now."""
        return self._num_waiting

    @property
    def completed(self) -> Fences:
        """The last complete operation of each timeline."""
        return self._completed

    def unmet(self, after: Fences) -> list[Timeline]:
        """The timelines on which `after` names an operation that is not complete."""
        return [name for name in TIMELINES if getattr(after, name) > getattr(self._completed, name)]

    def wait(self, after: Fences) -> float:
        """Wait until everything that `after` names is complete; return the seconds it took, 0.0 where it is already.

        Raises `FencesClosedError` if this is closed before.
        """
        with self._changed:
            if not self.unmet(after):
                return 0.0
            started = time.perf_counter()
            self._num_waiting += 1
            try:
                while self.unmet(after):
                    if self._is_closed:
                        raise FencesClosedError("the device is being closed")
                    self._changed.wait()
            finally:
                self._num_waiting -= 1
            return time.perf_counter() - started

    def complete(self, timeline: Timeline, number: int) -> None:
        """Operation `number` has ended, and with it all before it. Wakes whoever waits for it."""
        with self._changed:
            if number > getattr(self._completed, timeline):
                self._completed = replace(self._completed, **{timeline: number})
                self._changed.notify_all()

    def close(self) -> None:
        """Wake everybody: whose fences are not met by now gets `FencesClosedError`, as do later ones. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @contextmanager
    def operation(self, timeline: Timeline, number: int, after: Fences) -> Iterator[float]:
        """Wait for `after`, run the body as operation `number`, and complete that, however the body ends.

        Gives the seconds waited. Raises what `wait` raises.
        """
        try:
            yield self.wait(after)
        finally:
            self.complete(timeline, number)
