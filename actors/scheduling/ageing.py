"""Ageing: whoever has waited longest is passed over only so often.

Counted in admissions, not in seconds. Seconds would raise everybody who waits in a long queue above all newcomers, and the
policy would be first come, first served exactly when it matters; and they would need a clock. This way the policy keeps its
order, all but one admission in `MOST_PASSED` + 1, whatever the load.
"""

from __future__ import annotations

from heapq import heappop, heappush

from ...protocol.ids import SequenceId
from .sequence import Sequence

MOST_PASSED = 16
"""Admissions of younger sequences that pass the oldest that waits; the next is its own. So one that comes when there are `k`
older ones is passed by (k + 1) x MOST_PASSED younger ones at most, and by those for which others were preempted meanwhile.
"""

LEAST_STALE = 64
"""Heap entries beyond two for each that waits, before the heap is made anew."""


class Ageing:
    """Knows the oldest of those that wait, and how often it was passed."""

    def __init__(self) -> None:
        self._waiting: dict[SequenceId, Sequence] = {}
        self._by_age: list[SequenceId] = []  # a heap; those that wait no more are dropped when they come to its top
        self._num_passed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, seq: Sequence) -> None:
        """It waits."""
        self._waiting[seq.seq_id] = seq
        heappush(self._by_age, seq.seq_id)

    def remove(self, seq: Sequence) -> None:
        """It waits no more, and was not admitted. No-op for one that did not wait."""
        self._waiting.pop(seq.seq_id, None)
        if len(self._by_age) > 2 * len(self._waiting) + LEAST_STALE:
            self._by_age = sorted(self._waiting)  # which is a heap

    def admit(self, seq: Sequence) -> bool:
        """It waits no more: it was admitted. Returns whether its turn had come by age."""
        was_due = self.due() is seq
        self.remove(seq)
        oldest = self._oldest()
        if was_due:
            self._num_passed = 0
        elif oldest is not None and oldest.seq_id < seq.seq_id:
            self._num_passed += 1  # also if the oldest runs in between: it may be preempted by each that passes it
        return was_due

    def due(self) -> Sequence | None:
        """The oldest that waits, if it has been passed often enough to be next."""
        return self._oldest() if self._num_passed >= MOST_PASSED else None

    def _oldest(self) -> Sequence | None:
        while self._by_age:
            seq = self._waiting.get(self._by_age[0])
            if seq is not None:
                return seq
            heappop(self._by_age)
        return None
