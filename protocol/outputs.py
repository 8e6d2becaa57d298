"""What callers get: outputs of a request and statistics of the engine. Names are vLLM's."""

from __future__ import annotations

from typing import Any

import msgspec

from .messages import Metrics
from .sampling import FinishReason

RequestMetrics = Metrics


class CompletionOutput(msgspec.Struct):
    """One completion. What `text` and `token_ids` hold follows `SamplingParams.output_kind`.

    `stop_reason` is the stop string or stop token id that ended it, or the error's message.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Any] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class RequestOutput(msgspec.Struct):
    """One update of a request. `num_cached_tokens` counts prompt tokens that were not computed for it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[Any] | None = None
    metrics: RequestMetrics | None = None


class BlockCounts(msgspec.Struct, frozen=True):
    """KV blocks of one tier. `total == free + cached + referenced`, always."""

    total: int
    free: int
    cached: int
    referenced: int


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent snapshot. Cache queries and hits are in tokens, counted once per request."""

    num_running: int
    num_waiting: int
    num_preempted: int
    device_blocks: BlockCounts
    host_blocks: BlockCounts
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: dict[str, int]
    swap_out_bytes: int
    swap_in_bytes: int
    num_steps: int
    num_restarts: int
    num_paused: int = 0
    """Requests whose readers have fallen behind by `credit_window` tokens."""
    num_computed_tokens: int = 0
    """Rows' tokens computed by all steps so far: what the cache saved is what this lacks."""
