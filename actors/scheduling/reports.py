"""What happened in the scheduler, as facts for the logs. The actor writes them down; the core never does."""

from __future__ import annotations

import msgspec

from ...protocol.errors import Problem
from ...protocol.ids import RequestId
from ...protocol.sampling import FinishReason
from .sequence import Sequence


class Preempted(msgspec.Struct, frozen=True, gc=False):
    """A running sequence gave up its blocks. `num_freed_blocks` became available by it."""

    request_id: RequestId
    mode: str
    num_tokens: int
    num_freed_blocks: int
    num_preemptions: int


class Paused(msgspec.Struct, frozen=True, gc=False):
    """A request's reader fell behind: it waits for credit and holds nothing."""

    request_id: RequestId
    num_output_tokens: int


class Finished(msgspec.Struct, frozen=True):
    """The canonical account of a request. Durations in seconds; None where it did not come that far."""

    request_id: RequestId
    label: str
    finish_reason: FinishReason
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    ttft_s: float | None
    e2e_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_chunks: int
    num_preemptions: int
    problem: Problem | None = None

    @classmethod
    def of(cls, seq: Sequence, reason: FinishReason, now: float, problem: Problem | None) -> Finished:
        """The account of `seq`, which ends now."""
        scheduled, first, last = seq.first_scheduled_s, seq.first_token_s, seq.last_token_s
        return cls(
            request_id=seq.request_id,
            label=seq.admit.label,
            finish_reason=reason,
            queue_s=_span(seq.admit.arrival_s, scheduled),
            prefill_s=_span(scheduled, first),
            decode_s=_span(first, last),
            ttft_s=_span(seq.admit.arrival_s, first),
            e2e_s=now - seq.admit.arrival_s,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=seq.num_cached_tokens,
            num_output_tokens=seq.num_output_tokens,
            num_chunks=seq.num_chunks,
            num_preemptions=seq.num_preemptions,
            problem=problem,
        )


Report = Preempted | Paused | Finished


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
