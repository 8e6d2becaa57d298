"""Fences between the three streams of a GPU: events, which one stream waits for and the host does not.

An operation may be launched as soon as those it waits for have been launched: the streams see to the rest. So the host
waits only for what has not been launched yet, which is short, and never in a circle, since an operation names only such
as were issued before it.
"""

from __future__ import annotations

import threading

from ...protocol.messages import Fences
from ..timelines import TIMELINES, Timeline, Timelines
from .runtime import Event, Stream


class EventFences:
    """Which operations have been launched on each timeline, and the events behind them. Thread-safe."""

    def __init__(self) -> None:
        self._launched = Timelines()
        self._lock = threading.Lock()
        self._events: dict[Timeline, dict[int, Event]] = {name: {} for name in TIMELINES}

    @property
    def num_waiting(self) -> int:
        """Threads that wait for a launch now."""
        return self._launched.num_waiting

    def hold_back(self, stream: Stream, after: Fences) -> bool:
        """What is added to `stream` from here on starts after everything that `after` names. Whether there is any left of that.

        Waits for the launch of what is not launched yet. Raises `FencesClosedError` if `close` comes before that.
        """
        self._launched.wait(after)
        with self._lock:
            found = [self._last_until(name, getattr(after, name)) for name in TIMELINES]
        for event in found:
            if event is not None:
                stream.wait(event)
        return any(event is not None for event in found)

    def launched(self, timeline: Timeline, number: int, event: Event | None) -> None:
        """Operation `number` has been launched, `event` behind it, or has failed to be and never will: then None."""
        with self._lock:
            if event is not None:
                self._events[timeline][number] = event
        self._launched.complete(timeline, number)

    def over(self, timeline: Timeline, number: int) -> None:
        """Operation `number` is complete, and all before it on its timeline: nobody needs to wait for them any more."""
        with self._lock:
            events = self._events[timeline]
            for done in [other for other in events if other <= number]:
                del events[done]

    def close(self) -> None:
        """Wake everybody who waits for a launch. Idempotent."""
        self._launched.close()

    def _last_until(self, timeline: Timeline, number: int) -> Event | None:
        """The event that everything up to `number` is complete with; None: it is already.

        An operation that failed to be launched has none, and those before it count as much.
        """
        numbers = [other for other in self._events[timeline] if other <= number]
        return self._events[timeline][max(numbers)] if numbers else None
