"""Who goes before whom, who makes way, and how long anybody waits, held against the queues before and after each plan.

    newcomers      a waiting request does not start while a preempted one of its class or a higher one, which could,
                   stays behind; and among the waiting of a class the earlier goes first.
    preemptions    the first of all that run does not make way, unless for a higher class; nobody who has come back
                   makes way before it has gained a token; whoever makes way has no row in that step.
    waiting        whoever is first of all that could compute is served. While it runs: every few steps, unless it lacks
                   a block and those who hold the others have only just come back: then once these have gained a token.
                   While it has no slot or no blocks: once those that run have computed all that they may. Steps that
                   compute for somebody ahead of it (whose reader is slow) do not count. Those ahead of a request are
                   finitely many, so this bounds the wait of each.

The first and the last hold under policies that fix an order at arrival, by class and arrival (`ORDERED`).
"""

from __future__ import annotations

from ...protocol.config import EngineConfig
from ...protocol.ids import SequenceId
from ...protocol.messages import RunStep
from ..scheduling.core import SchedulerCore
from ..scheduling.sequence import Sequence, State
from .violation import Violation

NEWCOMERS, PREEMPTIONS, WAITING = "newcomers", "preemptions", "waiting"
ORDERED = frozenset({"fcfs", "static", "priority"})
MOST_STEPS = 6
"""Steps in which the first of all, while it runs, need not get on: a twin may be computing its next block."""


class _Wait:
    """How long the first of all has been waiting."""

    def __init__(self, seq: Sequence, core: SchedulerCore) -> None:
        self.seq_id = seq.seq_id
        self.state = seq.state
        self.standing = _standing(seq)
        self.num_steps = 0
        others = [other for other in core.queues.running if other is not seq]
        if seq.state is State.RUNNING:
            self.most = MOST_STEPS + sum(max(0, other.prefill_end - other.num_computed) for other in others)
            self.most += sum(other.length for other in core.queues.fetching.values())
        else:
            # Nobody comes in before it, so these only become fewer.
            self.most = MOST_STEPS + sum(max(1, other.max_length - other.num_computed) for other in others)
            self.most += sum(other.max_length for other in core.queues.fetching.values())


class Order:
    """`before` a plan, `after` it; `forget` whenever what waits is set back by something else."""

    def __init__(self, core: SchedulerCore, config: EngineConfig) -> None:
        self._core = core
        self._is_ordered = config.scheduling_policy in ORDERED
        self._running: list[Sequence] = []
        self._states: dict[SequenceId, tuple[Sequence, State, int]] = {}
        self._wait: _Wait | None = None
        self._has_gained: dict[SequenceId, bool] = {}
        self.num_preemptions = 0

    def gained(self, seq_id: SequenceId) -> None:
        """A sequence has been given a token."""
        self._has_gained[seq_id] = True

    def admitted(self, seq_id: SequenceId) -> None:
        """A sequence has come to the device, or has come back."""
        self._has_gained[seq_id] = seq_id not in self._has_gained

    def forget(self) -> None:
        """Nothing is owed to anybody: the device died, a row failed."""
        self._wait = None

    def before(self) -> None:
        """A plan is about to be made."""
        self._running = list(self._core.queues.running)
        sequences = self._core.table.sequences.values()
        self._states = {seq.seq_id: (seq, seq.state, seq.num_preemptions) for seq in sequences}

    def after(self, step: RunStep | None) -> None:
        """It has been made."""
        victims = [seq for seq, _, count in self._states.values() if seq.num_preemptions > count]
        if victims:
            self._check_victims(victims, step)
        if self._is_ordered:
            self._check_newcomers()
            if step is not None and step.seq_ids:
                self._check_waiting(step)

    # ---- preemptions ----------------------------------------------------------------------------

    def _check_victims(self, victims: list[Sequence], step: RunStep | None) -> None:
        best = min((seq.rank[0] for seq in self._core.table.sequences.values()), default=0)
        for seq in victims:
            self.num_preemptions += 1
            if step is not None and seq.seq_id in step.seq_ids and seq.state is not State.RUNNING:
                raise Violation(PREEMPTIONS, f"sequence {seq.seq_id} makes way and has a row in the same step")
            if not self._has_gained.get(seq.seq_id, True) and not seq.in_flight:
                raise Violation(PREEMPTIONS, f"sequence {seq.seq_id} makes way again before it has gained a token")
            if len(self._running) > 1 and seq is self._running[0] and seq.rank[0] <= best:
                raise Violation(PREEMPTIONS, f"sequence {seq.seq_id}, the first that runs, makes way for a later one")

    # ---- newcomers ------------------------------------------------------------------------------

    def _check_newcomers(self) -> None:
        begun = (State.RUNNING, State.FETCHING)
        came = [seq for seq, state, _ in self._states.values() if state is State.WAITING and seq.state in begun]
        if not came:
            return
        recovery = [seq for seq, state, _ in self._states.values() if state is seq.state is State.PREEMPTED]
        waiting = [seq for seq in self._core.queues.waiting if not seq.is_suspect]
        for seq in came:
            if seq.is_suspect:
                continue
            passed = [other for other in recovery if other.rank[0] <= seq.rank[0] and not other.is_out_of_credit]
            passed += [other for other in waiting if other.rank < seq.rank]
            if passed:
                raise Violation(NEWCOMERS, f"sequence {seq.seq_id} passes sequence {passed[0].seq_id}, {passed[0].state.value}")

    # ---- waiting --------------------------------------------------------------------------------

    def _check_waiting(self, step: RunStep) -> None:
        core = self._core
        could = [seq for seq in core.table.sequences.values() if _could_compute(seq)]
        if core.planner.suspects or not could:
            self._wait = None
            return
        seq = min(could, key=lambda seq: seq.rank)
        wait = self._wait
        if wait is None or wait.seq_id != seq.seq_id or wait.state is not seq.state or wait.standing < _standing(seq):
            self._wait = _Wait(seq, core)
            return
        sequences = core.table.sequences
        if any(seq_id in sequences and sequences[seq_id].rank < seq.rank for seq_id in step.seq_ids):
            return
        wait.num_steps += 1
        if wait.num_steps > wait.most:
            raise Violation(
                WAITING,
                f"sequence {seq.seq_id} is the first of all, {seq.state.value}, and has not got on in "
                f"{wait.num_steps} steps: {wait.most} are the bound",
            )


def _standing(seq: Sequence) -> tuple[int, int]:
    return seq.length, seq.num_computed


def _could_compute(seq: Sequence) -> bool:
    """Whether a plan could give it something to compute: neither its copies nor its reader nor its own answers hold it up."""
    if seq.state in (State.PAUSED, State.FETCHING) or seq.is_out_of_credit or seq.is_ending:
        return False
    return seq.state is State.RUNNING or not seq.in_flight
