"""A sequence: one token log on its way through the engine, and where it stands.

    WAITING -> RUNNING <-> PREEMPTED | PAUSED | FETCHING -> FINISHED(stop | length | abort | error)

One rule moves it: `num_computed` catches up with `length`. Both count what has been *sent* to the
device: `in_flight` tokens are being sampled by steps that have not answered yet, and are part of
`length` although their ids are not known here. So `length` grows when a step is planned, and
`log` when its answer comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from enum import Enum

from ...protocol.ids import RequestId, SequenceId, StepId
from ...protocol.journey import Journey, Stage
from ...protocol.messages import Admit, TokenLogprobs
from ...radix.holding import Holding
from ...radix.tokens import TokenLog
from .journeys import Traveller

SUSPECT_DEATHS = 2
"""Deaths of the device without a token in between after which a request present at them runs alone."""
CULPRIT_DEATHS = 4
"""Deaths after which it is failed. The last two fell on it alone: one of them may have been chance, two are a rule."""


class State(Enum):
    """Where a sequence stands. A finished one is in no table any more."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    PAUSED = "paused"
    FETCHING = "fetching"
    FINISHED = "finished"


STAGES: dict[State, Stage] = {
    State.WAITING: "queue",
    State.RUNNING: "prefill",
    State.PREEMPTED: "preempted",
    State.PAUSED: "paused",
    State.FETCHING: "fetch",
}


class Sequence:
    """State of one sequence in the scheduler. `rank` is its place in the policy's order, fixed at arrival; a policy that
    ages may raise it as it is admitted. `priority_class` is the one it came with: nobody preempts more by being aged.

    A request has `n` of them. `index` is its number among these, and `leader` the first, whose prompt is its own too.
    The first has none, unless its request follows another: then it is that one's.
    """

    __slots__ = (
        "admit",
        "counts_hits",
        "credit_length",
        "first_scheduled_s",
        "first_token_s",
        "has_fetched_ahead",
        "has_gained",
        "holding",
        "in_flight",
        "index",
        "is_held",
        "is_on_device",
        "journey",
        "last_token_s",
        "leader",
        "length",
        "log",
        "logprobs",
        "max_length",
        "num_cached_tokens",
        "num_chunks",
        "num_computed",
        "num_deaths",
        "num_preemptions",
        "num_prompt_tokens",
        "paused_s",
        "prefill_end",
        "priority_class",
        "prompt_logprobs",
        "queued_s",
        "rank",
        "request_id",
        "seq_id",
        "state",
        "stop_ids",
        "traveller",
        "void_until",
        "waited_for",
        "was_admitted",
    )

    def __init__(
        self,
        seq_id: SequenceId,
        admit: Admit,
        holding: Holding,
        *,
        max_length: int,
        rank: tuple[int, int],
        traveller: Traveller,
        index: int = 0,
        leader: Sequence | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.index = index
        self.leader = leader
        self.admit = admit
        self.request_id: RequestId = admit.request_id
        self.holding = holding
        self.log = TokenLog(admit.token_ids)
        self.logprobs: list[TokenLogprobs] = []  # of the tokens generated and known, where they are asked for
        # Of the prompt from its second token on, as far as they are known; None where they are not this one's to find.
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        if admit.params.prompt_logprobs is not None and index == 0:
            self.prompt_logprobs = []
        self.num_prompt_tokens = len(admit.token_ids)
        self.stop_ids = frozenset(admit.stop_token_ids)
        self.max_length = max_length
        self.rank = rank
        self.priority_class = rank[0]
        self.state = State.WAITING
        self.traveller = traveller
        self.journey: Journey | None = None  # once it has ended
        self.length = self.num_prompt_tokens
        self.prefill_end = self.num_prompt_tokens  # tokens known when it was last admitted
        self.num_computed = 0
        self.in_flight = 0
        self.void_until = StepId(0)  # what this step and earlier ones sampled for it is dropped
        self.waited_for = -1  # block for which it last waited to copy rather than compute
        self.is_on_device = False
        self.is_held = False  # it has its last token, and is here only for those that follow it
        self.has_gained = True  # a token since it was last brought back
        self.has_fetched_ahead = False  # since it was last set back: once is enough
        # Not one that looks up less than there is.
        self.counts_hits = (
            leader is None and self.prompt_logprobs is None
        )  # until it is first set back: what it finds then may be its own
        self.was_admitted = False  # it has been, at least once
        self.num_cached_tokens = 0
        self.num_chunks = 0
        self.num_preemptions = 0
        self.credit_length: float = math.inf  # its reader has granted tokens up to this length
        self.paused_s = 0.0
        self.num_deaths = 0  # of the device, in steps of which it took part, since it last gained a token
        self.queued_s = 0.0
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    def enter(self, state: State) -> None:
        """It stands there from now on."""
        self.state = state
        self.traveller.enter(STAGES[state])

    def forget_device(self) -> None:
        """The device is gone: nothing of this sequence is anywhere but in its log."""
        self.num_computed = 0
        self.in_flight = 0
        self.length = len(self.log)
        self.void_until = StepId(0)
        self.is_on_device = False
        if self.state is not State.WAITING:  # else it has not begun: what it finds then counts
            self.has_gained = False
            self.counts_hits = False

    @property
    def lookup_limit(self) -> int:
        """Tokens that may be taken from the cache: the last has to be computed, and what tells how likely the prompt was."""
        most = len(self.log) - 1
        if self.prompt_logprobs is None or len(self.prompt_logprobs) >= self.num_prompt_tokens - 1:
            return most
        return min(most, len(self.prompt_logprobs))

    @property
    def reads_its_prompt(self) -> bool:
        """Whether it has to compute, from here on, tokens that others may have computed already."""
        return self.prompt_logprobs is not None and self.num_computed < self.num_prompt_tokens - 1

    def learn(self, first: int, entries: list[TokenLogprobs]) -> bool:
        """How likely the prompt tokens from position `first` on were; what is known already is left as it is.

        False: what comes before them is missing, and nobody computes it any more.
        """
        if self.prompt_logprobs is None:
            return True
        known = len(self.prompt_logprobs) + 1 - first
        if known < 0:
            return False
        self.prompt_logprobs += entries[known:]
        return True

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
    def is_out_of_credit(self) -> bool:
        """Its reader is behind: nothing more may be planned until it has taken some. Or nothing more ever is: it is held,
        and once it has lost its KV nothing is gained by computing it again.
        """
        return self.length >= self.credit_length or self.is_held

    @property
    def is_suspect(self) -> bool:
        """The device died under it more than once: it runs alone until it gains a token."""
        return self.num_deaths >= SUSPECT_DEATHS

    @property
    def is_culprit(self) -> bool:
        """It has run alone, and the device has died under it twice like that."""
        return self.num_deaths >= CULPRIT_DEATHS

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and known."""
        return len(self.log) - self.num_prompt_tokens


def first_by_rank(waiting: Items[Sequence], recovery: Items[Sequence]) -> Sequence | None:
    """Of two lists in order of rank the first: of the higher class, within a class the preempted before the waiting."""
    if not waiting or not recovery:
        return (recovery or waiting or (None,))[0]
    return waiting[0] if waiting[0].rank[0] < recovery[0].rank[0] else recovery[0]
