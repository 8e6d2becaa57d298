"""A sequence: one token log on its way through the engine, and where it stands.

    WAITING -> RUNNING <-> PREEMPTED -> FINISHED(stop | length | abort | error)

One rule moves it: `num_computed` catches up with `length`. Both count what has been *sent* to the
device: `in_flight` tokens are being sampled by steps that have not answered yet, and are part of
`length` although their ids are not known here. So `length` grows when a step is planned, and
`log` when its answer comes.
"""

from __future__ import annotations

from enum import Enum

from ...protocol.ids import RequestId, SequenceId, StepId
from ...protocol.messages import Admit
from ...radix.holding import Holding
from ...radix.tokens import TokenLog


class State(Enum):
    """Where a sequence stands. A finished one is in no table any more."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Sequence:
    """State of one sequence in the scheduler. `rank` is its place in the policy's order, fixed at arrival."""

    __slots__ = (
        "admit",
        "counts_hits",
        "first_scheduled_s",
        "first_token_s",
        "has_gained",
        "holding",
        "in_flight",
        "is_on_device",
        "last_token_s",
        "length",
        "log",
        "max_length",
        "num_cached_tokens",
        "num_chunks",
        "num_computed",
        "num_preemptions",
        "num_prompt_tokens",
        "prefill_end",
        "queued_s",
        "rank",
        "seq_id",
        "state",
        "stop_ids",
        "void_until",
    )

    def __init__(self, seq_id: SequenceId, admit: Admit, holding: Holding, *, max_length: int, rank: tuple[int, int]) -> None:
        self.seq_id = seq_id
        self.admit = admit
        self.holding = holding
        self.log = TokenLog(admit.token_ids)
        self.num_prompt_tokens = len(admit.token_ids)
        self.stop_ids = frozenset(admit.stop_token_ids)
        self.max_length = max_length
        self.rank = rank
        self.state = State.WAITING
        self.length = self.num_prompt_tokens
        self.prefill_end = self.num_prompt_tokens  # tokens known when it was last admitted
        self.num_computed = 0
        self.in_flight = 0
        self.void_until = StepId(0)  # what this step and earlier ones sampled for it is dropped
        self.is_on_device = False
        self.has_gained = True  # a token since it was last brought back
        self.counts_hits = True  # until it is first set back: what it finds then may be its own
        self.num_cached_tokens = 0
        self.num_chunks = 0
        self.num_preemptions = 0
        self.queued_s = 0.0
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def request_id(self) -> RequestId:
        """The request this sequence belongs to."""
        return self.admit.request_id

    @property
    def num_remaining(self) -> int:
        """Tokens to compute until the next one can be sampled."""
        return self.length - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        """It has not caught up with what was known when it was admitted: a prompt, or a resumption."""
        return self.num_computed < self.prefill_end

    @property
    def is_ending(self) -> bool:
        """The tokens in flight are its last: nothing more may be planned for it."""
        return self.length >= self.max_length

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and known."""
        return len(self.log) - self.num_prompt_tokens
