"""Who runs, who was preempted, who waits: three lists, each in the policy's order. And who is in no order's way:
those whose readers are behind, and those whose blocks are on their way in.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import takewhile

from ...protocol.ids import SequenceId
from .policies import ChoosesNext
from .sequence import Sequence, State, first_by_rank


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank


class Behind:
    """The ids of those in `queue` that come after `rank`, the last first, found as they are asked for."""

    def __init__(self, queue: list[Sequence], rank: tuple[int, int]) -> None:
        self._queue = queue
        self._rank = rank

    def __iter__(self) -> Iterator[SequenceId]:
        return (seq.seq_id for seq in takewhile(lambda seq: seq.rank > self._rank, reversed(self._queue)))


class Queues:
    """Running, recovery (preempted), waiting, paused, fetching. A sequence is in at most one; `state` says which."""

    def __init__(self) -> None:
        self.running: list[Sequence] = []
        self.recovery: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.paused: dict[SequenceId, Sequence] = {}  # the first has been paused for the longest
        self.fetching: dict[SequenceId, Sequence] = {}  # admitted: they hold blocks, and run when a copy has ended
        self.chooser: ChoosesNext | None = None
        """The policy, if it has a say in who is next: else that is the first by rank."""
        self.num_waiting_requests = 0
        """Requests none of whose sequences has begun."""

    def add_waiting(self, seq: Sequence) -> None:
        """A new request."""
        seq.enter(State.WAITING)
        self.num_waiting_requests += seq.leader is None
        insort(self.waiting, seq, key=_rank)
        if self.chooser is not None:
            self.chooser.on_queued(seq)

    def withdraw(self, seq: Sequence) -> None:
        """Take a waiting sequence out again that its policy has perhaps not been told of, or raised over."""
        if seq in self.waiting:
            self._take_out(seq)

    def start(self, seq: Sequence) -> None:
        """From waiting, recovery or fetching to running."""
        is_admitted = seq.state is State.FETCHING
        self._take_out(seq)
        if self.chooser is not None and not is_admitted:
            self.chooser.on_admitted(seq)
        seq.enter(State.RUNNING)
        insort(self.running, seq, key=_rank)

    def fetch(self, seq: Sequence) -> None:
        """From waiting or recovery to fetching: it is admitted, and part of what it was given is still to come."""
        self._take_out(seq)
        if self.chooser is not None:
            self.chooser.on_admitted(seq)
        seq.enter(State.FETCHING)
        self.fetching[seq.seq_id] = seq

    def preempt(self, seq: Sequence) -> None:
        """From running or fetching to recovery, where it keeps its rank."""
        self.remove(seq)
        self._recover(seq)

    def pause(self, seq: Sequence, now: float) -> None:
        """From running or recovery to paused: its reader is out of credit."""
        self.remove(seq)
        seq.enter(State.PAUSED)
        seq.paused_s = now
        self.paused[seq.seq_id] = seq

    def resume(self, seq: Sequence) -> None:
        """From paused to recovery, at its rank: its reader has granted more."""
        self.remove(seq)
        self._recover(seq)
        seq.traveller.enter("queue")

    def _recover(self, seq: Sequence) -> None:
        seq.enter(State.PREEMPTED)
        insort(self.recovery, seq, key=_rank)
        if self.chooser is not None:
            self.chooser.on_queued(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of the list it is in."""
        if self.chooser is not None:
            self.chooser.on_left(seq)
        self._take_out(seq)

    def _take_out(self, seq: Sequence) -> None:
        if seq.state is State.PAUSED:
            del self.paused[seq.seq_id]
            return
        if seq.state is State.FETCHING:
            del self.fetching[seq.seq_id]
            return
        if seq.state is State.WAITING and seq.leader is None:
            self.num_waiting_requests -= 1
        queue = self._queue(seq)
        place = bisect_left(queue, seq.rank, key=_rank)
        assert queue[place] is seq, f"sequence {seq.seq_id} is not where its state says"
        del queue[place]

    def candidate(self) -> Sequence | None:
        """Whom to admit next: the policy's choice, or the first by rank."""
        if self.chooser is not None:
            return self.chooser.next_of(self.waiting, self.recovery)
        return self.first_by_rank()

    def first_by_rank(self) -> Sequence | None:
        """Of the higher class first, within a class the preempted before the waiting."""
        return first_by_rank(self.waiting, self.recovery)

    def later_than(self, seq: Sequence) -> Iterator[Sequence]:
        """Running sequences after `seq` in order, the last first."""
        place = bisect_left(self.running, seq.rank, key=_rank)
        return reversed(self.running[place + 1 :])

    def behind(self, seq: Sequence) -> Behind:
        """The preempted after `seq` in order, the last first: whose host blocks it may have."""
        return Behind(self.recovery, seq.rank)

    def _queue(self, seq: Sequence) -> list[Sequence]:
        if seq.state is State.RUNNING:
            return self.running
        return self.recovery if seq.state is State.PREEMPTED else self.waiting
