"""Lower numbers first (vLLM's sense). A request preempts only those of strictly lower priority, and ages.

Ageing (`ageing.py`): after 16 admissions that passed the one that has waited longest, preempted or new, the next is its
own. It then comes before everybody to its end, so that what arrives later cannot preempt it again; but it preempts no more
than its own priority allows. Under unending arrivals of high priority the lowest so gets every 17th admission.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from ....protocol.messages import Admit
from ..ageing import Ageing
from ..sequence import Sequence, first_by_rank

AGED = -(1 << 63)
"""The class of one that has aged: above every priority, which has 32 bits."""


class Policy:
    """A class for each priority; within one, order of arrival."""

    def __init__(self) -> None:
        self._ageing = Ageing()

    def priority_class(self, admit: Admit) -> int:
        """The request's priority."""
        return admit.priority

    def admits_beside(self, num_running: int) -> bool:
        """Always: continuous batching."""
        return True

    def on_queued(self, seq: Sequence) -> None:
        """It may be passed from here on."""
        self._ageing.add(seq)

    def on_left(self, seq: Sequence) -> None:
        """It may not any more."""
        self._ageing.remove(seq)

    def on_admitted(self, seq: Sequence) -> None:
        """Whose turn had come by age is of the first class from here on."""
        if self._ageing.admit(seq):
            seq.rank = (AGED, seq.seq_id)

    def next_of(self, waiting: Items[Sequence], recovery: Items[Sequence]) -> Sequence | None:
        """Whose turn has come by age; else of the higher class first, within one the preempted first."""
        due = self._ageing.due()
        if due is not None:
            return due
        return first_by_rank(waiting, recovery)
