"""What callers get: outputs of a request and statistics of the engine. Names are vLLM's."""

from __future__ import annotations

import msgspec

from .messages import Metrics
from .sampling import FinishReason

RequestMetrics = Metrics


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """How likely the model found a token, before temperature and filters: the natural logarithm of its probability.

    `rank` counts from 1, the most likely. `decoded_token` is the token's text alone.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct):
    """One completion. What `text`, `token_ids` and `logprobs` hold follows `SamplingParams.output_kind`.

    `stop_reason` is the stop string or stop token id that ended it, or the error's message. Where `logprobs` are
    asked for, each token has a dictionary of the token itself and the most likely ones, by token id; the sum of the
    tokens' own is `cumulative_logprob`, of the whole completion so far.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class RequestOutput(msgspec.Struct):
    """One update of a request: all of its `n` completions, by index. `finished` when each has its `finish_reason`.

    `num_cached_tokens` counts prompt tokens that were not computed for it. Where `prompt_logprobs` are asked for, each
    prompt token has a dictionary of itself and the likeliest ones in its place, by token id; the first, which follows on
    nothing, has None. They are there from the first output on that has a token of the first completion.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None


class BeamSearchSequence(msgspec.Struct):
    """A continuation that a beam search found. `tokens` and `text` begin with the prompt's, as in vLLM.

    `cum_logprob` is the sum of the log-probabilities of the generated tokens, and `logprobs` what each of these was
    chosen from, by token id.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    logprobs: list[dict[int, Logprob]]
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class BeamSearchOutput(msgspec.Struct):
    """What a beam search found, the best first."""

    sequences: list[BeamSearchSequence]


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
    num_fetching: int = 0
    """Requests that wait for blocks on their way from the host."""
    num_swap_fallbacks: int = 0
    """Preemptions by recompute for want of room on the host."""
    num_host_hits: dict[str, int] = {}
    """Choices between copying in ("fetch") what only the host holds and computing it again ("recompute")."""
    num_failed_copies: int = 0
    """Copies between the tiers that failed: what they should have brought was computed again."""
    step_wait_s: float = 0.0
    """Seconds that steps waited on the device for copies."""
    fetch_wait_s: float = 0.0
    """Seconds in which no step ran because everything that could run was being copied in."""
    num_non_finite_rows: int = 0
    """Rows whose logits were not finite, each the end of its request."""
    num_computed_tokens: int = 0
    """Rows' tokens computed by all steps so far: what the cache saved is what this lacks."""
