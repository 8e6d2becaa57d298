"""Which of a device's operations takes too long: steps and copies that were sent and not answered.

Each timeline runs its operations one after the other, so only its first unanswered one can be at work. It counts
from the moment when it could have begun: it was sent, the one before it was answered, and so was everything that it
waits for on the other timelines. So a step is not judged for a copy that holds it up; the copy is, by its own time.

Pure: `now` is the caller's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from ...gpu.timelines import TIMELINES, Timeline
from ...protocol.messages import CopyBlocks, CopyDone, Fences, RunStep, StepDone

_WORDS: dict[Timeline, str] = {"step": "a step", "copy_out": "a copy out", "copy_in": "a copy in"}


class Patience(NamedTuple):
    """How long an operation may take: its prediction and then `factor` times that, or `least_s` where it is more.

    One of which nobody knows how long it should take may take `unpredicted_s`. Copies have all of it `copies` times:
    their lanes give way to whoever wants their core, so that a busy machine takes them for tens of times as long.
    """

    least_s: float
    factor: float
    unpredicted_s: float
    copies: float = 6.0


class _Operation(NamedTuple):
    number: int
    after: Fences
    predicted_s: float | None


class Overdue:
    """What one device, from its first message to its end, has been sent and has not answered."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._unanswered: dict[Timeline, deque[_Operation]] = {timeline: deque() for timeline in TIMELINES}
        self._last_sent: dict[Timeline, int] = dict.fromkeys(TIMELINES, 0)
        self._began: dict[Timeline, float | None] = dict.fromkeys(TIMELINES)
        """When the first operation of each could have begun; None: it cannot yet, or there is none."""

    def sent(self, message: RunStep | CopyBlocks, predicted_s: float | None, now: float) -> None:
        """A step or a copy is on its way; `predicted_s` is how long it should take once it runs."""
        timeline, number = _name(message)
        # What was never sent holds nothing up that we know of: a device that waits for it is overdue.
        after = Fences(*(min(getattr(message.after, name), self._last_sent[name]) for name in TIMELINES))
        self._last_sent[timeline] = number
        self._unanswered[timeline].append(_Operation(number, after, predicted_s))
        self._begin(now)

    def answered(self, message: StepDone | CopyDone, now: float) -> None:
        """A step or a copy has ended."""
        timeline, number = _name(message)
        unanswered = self._unanswered[timeline]
        while unanswered and unanswered[0].number <= number:
            unanswered.popleft()
            self._began[timeline] = None
        self._begin(now)

    def verdict(self, now: float) -> str | None:
        """What is overdue, in words; None if nothing is."""
        return next((words for timeline in TIMELINES for words in self._judge(timeline, now)), None)

    def _judge(self, timeline: Timeline, now: float) -> Iterator[str]:
        began, what = self._began[timeline], _WORDS[timeline]
        if began is None:
            return
        seconds, predicted_s = now - began, self._unanswered[timeline][0].predicted_s
        times = 1.0 if timeline == "step" else self._patience.copies
        if predicted_s is None:
            if seconds > times * self._patience.unpredicted_s:
                yield f"{what} is overdue after {seconds:.1f} s"
        elif seconds - predicted_s > times * max(self._patience.least_s, self._patience.factor * predicted_s):
            yield f"{what} is overdue by {seconds - predicted_s:.1f} s (it should have taken {predicted_s:.3f} s)"

    def _begin(self, now: float) -> None:
        """Whatever could not begin before, and can now, counts from now on."""
        for timeline, unanswered in self._unanswered.items():
            if unanswered and self._began[timeline] is None and not self._is_held_up(unanswered[0].after):
                self._began[timeline] = now

    def _is_held_up(self, after: Fences) -> bool:
        return any(found and found[0].number <= getattr(after, name) for name, found in self._unanswered.items())


def _name(message: RunStep | CopyBlocks | StepDone | CopyDone) -> tuple[Timeline, int]:
    if isinstance(message, RunStep | StepDone):
        return "step", message.step_id
    return ("copy_out" if message.direction == "out" else "copy_in"), message.copy_id
