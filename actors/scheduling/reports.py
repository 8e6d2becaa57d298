"""What happened in the scheduler, as facts for the logs. The actor writes them down; the core never does."""

from __future__ import annotations

import msgspec

from ...protocol.errors import Problem
from ...protocol.ids import RequestId
from ...protocol.journey import Journey
from ...protocol.sampling import FinishReason
from .request import Request


class Preempted(msgspec.Struct, frozen=True, gc=False):
    """A running sequence gave up its blocks: `num_freed_blocks` became available by it. Both costs, and why this mode."""

    request_id: RequestId
    mode: str
    num_tokens: int
    num_freed_blocks: int
    num_preemptions: int
    swap_s: float
    recompute_s: float
    reason: str


class HostHit(msgspec.Struct, frozen=True, gc=False):
    """A sequence was admitted with part of its tokens on the host only: `fetched`, or computed again; both costs."""

    request_id: RequestId
    fetched: bool
    num_tokens: int
    fetch_s: float
    recompute_s: float


class Paused(msgspec.Struct, frozen=True, gc=False):
    """A request's reader fell behind: it waits for credit and holds nothing."""

    request_id: RequestId
    num_output_tokens: int


class Finished(msgspec.Struct, frozen=True):
    """The canonical account of a request. Durations in seconds; None where it did not come that far.

    Of several sequences, `finish_reason` is the last one's to end; tokens, chunks and preemptions are all of theirs,
    the prompt counts once.
    """

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
    num_sequences: int = 1
    arrival_s: float = 0.0
    journey: Journey | None = None
    """Of the sequence that was under way for the longest, up to the scheduler's end of it."""

    @classmethod
    def of(cls, request: Request, reason: FinishReason, now: float, problem: Problem | None) -> Finished:
        """The account of `request`, which ends now."""
        admit, sequences = request.admit, request.sequences
        scheduled = min((seq.first_scheduled_s for seq in sequences if seq.first_scheduled_s is not None), default=None)
        first = min((seq.first_token_s for seq in sequences if seq.first_token_s is not None), default=None)
        last = max((seq.last_token_s for seq in sequences if seq.last_token_s is not None), default=None)
        return cls(
            request_id=admit.request_id,
            label=admit.label,
            finish_reason=reason,
            queue_s=_span(admit.arrival_s, scheduled),
            prefill_s=_span(scheduled, first),
            decode_s=_span(first, last),
            ttft_s=_span(admit.arrival_s, first),
            e2e_s=now - admit.arrival_s,
            num_prompt_tokens=len(admit.token_ids),
            num_cached_tokens=sequences[0].num_cached_tokens,
            num_output_tokens=sum(seq.num_output_tokens for seq in sequences),
            num_chunks=sum(seq.num_chunks for seq in sequences),
            num_preemptions=request.num_preemptions,
            problem=problem,
            num_sequences=len(sequences),
            arrival_s=admit.arrival_s,
            journey=max((seq.journey for seq in sequences if seq.journey is not None), key=_total_s, default=None),
        )


Report = Preempted | HostHit | Paused | Finished


def _total_s(journey: Journey) -> float:
    return journey.total_s


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
