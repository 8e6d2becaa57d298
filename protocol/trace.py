"""A run's trace: JSON lines, one record each, in the order in which things happened to the scheduler.

The first record is `Began`, the last of a run that was ended `Finished`. In between stand the scheduler's inputs, each
with the clock it was handled at, and what it decided. Inputs and plans are all that a scheduler's decisions depend on,
so `repertory simulate FILE` comes to the same ones. Records are objects; `type` says which of the classes below, and a
field at its default is left out. A reader skips types it does not know: what is added is no new version.

    record            when                                              a request's life
    ---------------   -----------------------------------------------   ------------------------------------------
    Began             once: configuration, capacity, clocks
    Named             before the first record that uses the names
    Arrived           an `Admit` was handled                            arrival_s, at: queued
    Planned           the scheduler planned, a step or none             admitted: it runs, or runs again; chunks
    CopySent          a copy between the tiers was sent
    StepEnded         a step's tokens came back                         at: of the sampled rows' tokens
    CopyEnded         a copy ended
    Preempted         a sequence gave its blocks up                     at, both costs
    Fetched, Paused   part of it is on the host; its reader is behind
    Aborted, Credited what clients and the detokenizer said
    Ended             a sequence ended                                  at, why, how many tokens
    Travelled         a request's last text was taken                   its journey: every stage it was in
    DeviceEvent       the device died, came back, or is shared
    Told              a reset, a drain, a repetition, closed requests
    Finished          the trace ends: why, and the digest of all decisions

Times are seconds on the monotonic clock of the engine's process, durations seconds; `Began.wall_s` ties the clock to the
calendar. Ids are those of the messages (`messages.py`).

*What was said stays unsaid.* Without `trace_content` a trace has no token ids. Each block of a prompt or an output
(`block_size` tokens, or fewer at a sequence's end) has a number: the same number stands for the same tokens after the
same blocks, in one namespace, for as long as the recorder remembers them (`hash_ids`; nothing is hashed, numbers are
counted). `Named` says of each new number how many leading tokens it shares with its nearest neighbours in order among
the blocks that follow the same parent. That is all a scheduler can tell of tokens, so a replay decides alike; what it
tells a reader is which requests have beginnings in common, and where they part.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .capacity import Capacity
from .journey import Journey
from .messages import CopyDirection
from .sampling import FinishReason, OutputKind

TRACE_VERSION = 1
"""Raised when a reader of the one before would misread the new one."""

NOBODY = -1
"""In `Named`: no neighbour on that side."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag=True, tag_field="type", kw_only=True):
    """Base of all records: one line, tagged with its class name."""


class Began(Record, frozen=True):
    """The first line. `config` holds the settings that differ from their defaults, no secrets among them."""

    version: int
    engine: str
    """The version of repertory that wrote it."""
    config: dict[str, Any]
    capacity: Capacity
    epoch: int
    at: float
    wall_s: float
    """Seconds since 1970 at the moment that the monotonic clock calls `at`."""
    content: bool = False
    """Whether token ids are in it."""


class Named(Record, frozen=True):
    """New blocks: numbers `first` to `first + count - 1`, each the child of the one before it, the first of `parent`.

    A parent below 0 is the beginning of namespace `-1 - parent`. The first stands between `left` and `right`, those of
    its siblings that are remembered and next to it in order (of token ids as little-endian bytes), and shares
    `num_left` and `num_right` leading tokens with them. The last has `num_tokens` tokens; 0 means a whole block.
    """

    first: int
    parent: int
    count: int = 1
    left: int = NOBODY
    right: int = NOBODY
    num_left: int = 0
    num_right: int = 0
    num_tokens: int = 0


class Arrived(Record, frozen=True):
    """A request was admitted to the scheduler's table, or refused (`seq_id` 0). Its sequences are `seq_id` and following.

    `hash_ids` are the blocks of the prompt, of which the last may be shorter than the others.
    """

    at: float
    request_id: int
    label: str
    arrival_s: float
    num_prompt_tokens: int
    seq_id: int = 0
    hash_ids: list[int] = []
    token_ids: list[int] | None = None
    namespace: int = 0
    n: int = 1
    max_tokens: int | None = 16
    stop_token_ids: list[int] = []
    """With content only."""
    output_kind: OutputKind = "cumulative"
    priority: int = 0
    tenant: str | None = None
    holds: bool = False
    follows: int | None = None
    prompt_logprobs: int | None = None
    """It computes all of its prompt, cached or not."""


class Planned(Record, frozen=True):
    """A plan at clock `at`, which took `plan_s` to make and send. `step_id` 0: there was nothing to compute, or not yet.

    Rows are first the `decodes` (sequences: one token each, from where they stand, and one sampled), then the `chunks`
    (sequence, start, tokens, whether one is sampled). `load` is (prefill tokens, query-key pairs, rows). `after` are the
    fences (step, copy out, copy in). `copies` are blocks copied on the device before the rows: (source, target, tokens).
    Counts are those after planning. `digest` is that of all decisions so far, cut to 16 digits.
    """

    at: float
    step_id: int = 0
    epoch: int = 0
    plan_s: float = 0.0
    predicted_s: float | None = None
    decodes: list[int] = []
    chunks: list[tuple[int, int, int, int]] = []
    load: tuple[int, int, int] = (0, 0, 0)
    admitted: list[int] = []
    released: list[int] = []
    copies: list[tuple[int, int, int]] = []
    after: tuple[int, int, int] = (0, 0, 0)
    num_running: int = 0
    num_waiting: int = 0
    num_preempted: int = 0
    num_free: int = 0
    num_cached: int = 0
    num_evicted: int = 0
    """Device blocks taken from the cache since the last plan that made a step."""
    num_host_used: int = 0
    """Host blocks that hold something, whoever it is for."""
    digest: str = ""


class CopySent(Record, frozen=True):
    """`num_blocks` whole blocks are to go from one tier to the other once what `after` names is complete."""

    at: float
    copy_id: int
    direction: CopyDirection
    num_blocks: int
    after: tuple[int, int, int] = (0, 0, 0)
    predicted_s: float = 0.0


class StepEnded(Record, frozen=True):
    """A step came back. Its tokens are those of the sampled rows in their order, save for `failed` ones.

    `seq_ids` is there only where the device answered otherwise. `failed` are (sequence, whether its KV is sound).
    """

    at: float
    step_id: int
    epoch: int
    seconds: float
    waited_s: float = 0.0
    num_tokens: int = 0
    failed: list[tuple[int, bool]] = []
    seq_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CopyEnded(Record, frozen=True):
    """A copy ended, well or not, after `waited_s` for its fences and `seconds` of copying."""

    at: float
    copy_id: int
    epoch: int
    direction: CopyDirection
    num_bytes: int
    seconds: float
    waited_s: float = 0.0
    ok: bool = True


class Aborted(Record, frozen=True):
    """A request, or one sequence of it, was to stop: its client went, or the detokenizer found an end."""

    at: float
    request_id: int
    reason: str = "abort"
    index: int | None = None


class Credited(Record, frozen=True):
    """A reader took tokens."""

    at: float
    request_id: int
    num_tokens: int
    index: int = 0


class DeviceEvent(Record, frozen=True):
    """The device host was lost, a new one is ready, or others have come to use the device."""

    at: float
    what: Literal["lost", "ready", "shared"]
    epoch: int


class Told(Record, frozen=True):
    """The scheduler was told to forget its cache, to take no new requests, to repeat a request, that some are closed, or that
    the frontend that made those of an `incarnation` has left.
    """

    at: float
    what: Literal["reset", "drain", "resend", "closed", "left"]
    request_ids: list[int] = []
    incarnation: int = 0


class Preempted(Record, frozen=True):
    """A running sequence gave up its blocks, `num_freed_blocks` became available. Both costs in seconds, and why this mode."""

    at: float
    request_id: int
    mode: str
    num_tokens: int
    num_freed_blocks: int
    swap_s: float
    recompute_s: float
    reason: str


class Fetched(Record, frozen=True):
    """A sequence came in with tokens on the host only: they are copied in (`fetched`) or computed again; both costs."""

    at: float
    request_id: int
    fetched: bool
    num_tokens: int
    fetch_s: float
    recompute_s: float


class Paused(Record, frozen=True):
    """A request's reader is behind: it holds nothing until there is credit."""

    at: float
    request_id: int
    num_output_tokens: int


class Ended(Record, frozen=True):
    """A sequence ended with `num_output_tokens` tokens; `reason` None: the trace did, before it.

    `hash_ids` are its blocks from block `num_prompt_tokens // block_size` on: what of the prompt fills no block, and the
    output. An output that never came to its end, because a crash was first, is not in the trace.
    `by_token`: its last token is one of the request's stop ids. `num_cached_tokens` of the prompt were found.
    """

    at: float
    request_id: int
    index: int = 0
    reason: FinishReason | None = None
    num_output_tokens: int = 0
    by_token: bool = False
    num_cached_tokens: int = 0
    hash_ids: list[int] = []


class Finished(Record, frozen=True):
    """The last line. `reason`: "closed", or what kept the recorder from going on. `digest` is of all decisions."""

    at: float
    reason: str
    digest: str


class Travelled(Record, frozen=True):
    """A request is over, all its sequences: how it came to that. Counts are those of its line `request.finished`.

    Times in `journey` count from `arrival_s`.
    """

    at: float
    request_id: int
    label: str
    arrival_s: float
    reason: FinishReason
    journey: Journey
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0


AnyRecord = (
    Began
    | Named
    | Arrived
    | Planned
    | CopySent
    | StepEnded
    | CopyEnded
    | Aborted
    | Credited
    | DeviceEvent
    | Told
    | Preempted
    | Fetched
    | Paused
    | Ended
    | Finished
    | Travelled
)
"""What a line may hold."""
