"""What is counted, as it travels to whoever renders it: plain numbers, from one moment.

Counters only grow while their process lives. Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .messages import Columns, CopyDirection
from .outputs import EngineStats

ActorName = Literal["tokenizer", "scheduler", "detokenizer", "dispatcher", "link"]
"""Who has an inbox. A frontend process names its own: no others become labels."""

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]

MOST_ACTORS = 8
"""That one process may report."""


class ActorLoad(Columns, frozen=True):
    """An actor's inbox and how much it has done. A turn is a batch, or a wait that ended without: from there to the next.

    `handler_s` is time on the clock, waits for room in other inboxes included. `process` says which one it lives in.
    """

    name: ActorName
    depth: Count = 0
    """Unread messages now."""
    num_messages: Count = 0
    num_turns: Count = 0
    handler_s: Seconds = 0.0
    num_restarts: Count = 0
    process: str = ""


ActorLoads = Annotated[list[ActorLoad], Meta(max_length=MOST_ACTORS)]


class Bins(Columns, frozen=True):
    """A histogram: how many values fell into each bucket (`actors/observing/buckets.py`), the last is above all bounds."""

    counts: list[int]
    total: float


class Copying(Columns, frozen=True):
    """Copies of KV blocks in one direction."""

    direction: CopyDirection
    num_copies: int
    num_failed: int
    num_bytes: int
    seconds: float
    """In which a copy ran."""
    waited_s: float
    """In which a copy waited for the steps or copies before it."""
    rate: float
    """Bytes/s that the next copy is expected to make."""


class CoreMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the core counts, at one moment. `bins` are by metric name, without prefix."""

    model_name: str
    block_size: int
    stats: EngineStats
    num_prompt_tokens: int
    """Of each request once, when it is first admitted, cached or not."""
    num_prefill_tokens: int
    """Computed by chunks: prompts less what the cache held, and what preemption makes be computed again."""
    num_generated_tokens: int
    num_resumptions: int
    """Admissions of requests that had been admitted before: after a preemption, a pause, a lost device."""
    finished: dict[str, int]
    """Requests by finish reason."""
    refused: dict[str, int]
    """Requests that the scheduler refused, by the error's name."""
    preemptions: list[tuple[str, str, int]]
    """Mode, reason, and how many."""
    copies: list[Copying]
    bins: dict[str, Bins]
    stage_s: dict[str, float]
    """Seconds that requests which have ended spent in each stage."""
    num_tree_nodes: int
    num_evictable_blocks: int
    num_credits: int
    """Tokens that may still be generated before a reader has to take some."""
    step_error_s: float
    """Running mean of how wrong predictions of steps are."""
    actors: list[ActorLoad] = []
    num_frontends: int = 0
    num_faults: int = 0
    """Failures of the counting itself."""
