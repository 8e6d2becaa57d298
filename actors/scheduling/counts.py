"""What the scheduler counts, for metrics: when a request goes from one state to another, and once a step. Never per token.

    on_admitted      the first time that a sequence has what it needs to run: prompt tokens are counted here, and only here
    on_resumed       each time after that
    on_preempted     it gave its blocks up
    on_first_token   of a sequence
    on_answer        a step has ended: its rows and its duration
    on_step          its tokens, as many as somebody wants
    on_copy_done     a copy between the tiers
    on_finished      the account of a request
    on_refused       there is none

All rows of a step that decode got their last token from the step before: they share one gap, and the histogram of
inter-token latencies takes it once, weighted by their number. Rows that come back (after a preemption, say) have gaps
of their own; there are few. A row that sat out a step for want of a block counts a gap that is that step too short.

Nothing here may fail a request: an exception is kept in `fault` and counted, and goes no further. A duration that is
negative (a frontend's clock is another process's) counts as zero.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from ...protocol.messages import CopyDirection, CopyDone
from ...protocol.metrics import Bins, Copying
from ..observing.buckets import BUCKETS
from .cost import Decision
from .draft import Draft
from .reports import Finished
from .sequence import Sequence, State

P = ParamSpec("P")


def _harmless(count: Callable[Concatenate[Counts, P], None]) -> Callable[Concatenate[Counts, P], None]:
    @wraps(count)
    def counted(self: Counts, /, *args: P.args, **options: P.kwargs) -> None:
        try:
            count(self, *args, **options)
        except Exception as error:
            self.num_faults += 1
            self.fault = repr(error)

    return counted


class Histogram:
    """Counts of values by bucket, and their sum."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, weight: int = 1) -> None:
        """`weight` values alike. What is below zero is zero."""
        value = max(0.0, value)
        self.counts[bisect_left(self._bounds, value)] += weight
        self.total += value * weight

    def taken(self) -> Bins:
        """As it is now."""
        return Bins(list(self.counts), self.total)


class CopyCounts:
    """Of one direction."""

    def __init__(self) -> None:
        self.num_copies = 0
        self.num_failed = 0
        self.num_bytes = 0
        self.seconds = 0.0
        self.waited_s = 0.0

    def taken(self, direction: CopyDirection, *, rate: float) -> Copying:
        """As it is now. `rate` is in bytes/s."""
        return Copying(direction, self.num_copies, self.num_failed, self.num_bytes, self.seconds, self.waited_s, rate)


class Counts:
    """Numbers that only grow."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_prefill_tokens = 0
        self.num_generated_tokens = 0
        self.num_resumptions = 0
        self.step_s = 0.0
        self.finished = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.refused: dict[str, int] = {}
        self.preemptions: dict[tuple[str, str], int] = {}
        self.copies: dict[CopyDirection, CopyCounts] = {"out": CopyCounts(), "in": CopyCounts()}
        self.histograms = {name: Histogram(bounds) for name, bounds in BUCKETS.items()}
        self.stage_s: dict[str, float] = {}
        self.num_faults = 0
        self.fault: str | None = None
        """The last exception, in words."""
        self._first_tokens = 0
        self._num_returned = 0
        self._answered_s: float | None = None

    # ---- requests -------------------------------------------------------------------------------

    @_harmless
    def on_admitted(self, seq: Sequence) -> None:
        """A sequence is to run for the first time. A request's prompt counts with its first; a follower's is its leader's."""
        if seq.leader is None:
            self.num_prompt_tokens += seq.num_prompt_tokens

    @_harmless
    def on_resumed(self) -> None:
        """A sequence runs again."""
        self.num_resumptions += 1

    @_harmless
    def on_first_token(self, seq: Sequence, now: float, *, opens: bool) -> None:
        """A sequence has its first token, and so has its request, if it `opens` it."""
        self._first_tokens += 1
        if opens and not seq.admit.holds:
            self.histograms["time_to_first_token_seconds"].add(now - seq.admit.arrival_s)

    @_harmless
    def on_refused(self, kind: str) -> None:
        """A request was refused with an error of this name."""
        self.refused[kind] = self.refused.get(kind, 0) + 1

    @_harmless
    def on_preempted(self, decision: Decision) -> None:
        """A sequence gave its blocks up."""
        key = decision.mode, decision.reason
        self.preemptions[key] = self.preemptions.get(key, 0) + 1

    @_harmless
    def on_finished(self, report: Finished) -> None:
        """A request has ended that was admitted here, whether it ever ran or not."""
        self.finished[report.finish_reason] += 1
        add = self._add
        add("e2e_request_latency_seconds", report.e2e_s)
        add("request_queue_time_seconds", report.queue_s)
        add("request_prefill_time_seconds", report.prefill_s)
        add("request_decode_time_seconds", report.decode_s)
        add("request_prompt_tokens", report.num_prompt_tokens)
        add("request_generation_tokens", report.num_output_tokens)
        add("request_num_preemptions", report.num_preemptions)
        num_gaps = report.num_output_tokens / report.num_sequences - 1
        if report.decode_s is not None and num_gaps > 0:
            add("request_time_per_output_token_seconds", report.decode_s / num_gaps)
        journey = report.journey
        for stage, seconds in journey.seconds().items() if journey is not None else ():
            self.stage_s[stage] = self.stage_s.get(stage, 0.0) + seconds

    def _add(self, name: str, value: float | None) -> None:
        if value is not None:
            self.histograms[name].add(value)

    # ---- the device -----------------------------------------------------------------------------

    @_harmless
    def on_answer(self, draft: Draft, seconds: float, now: float) -> None:
        """A step has ended; its tokens are not taken in yet."""
        self._first_tokens = 0
        self._num_returned = 0
        if not draft.rows:
            return
        add = self.histograms["inter_token_latency_seconds"].add
        for place in range(draft.num_decodes, len(draft.rows)):
            seq = draft.rows[place]
            if draft.samples[place] and seq.last_token_s is not None and seq.state is not State.FINISHED:
                self._num_returned += 1
                add(now - seq.last_token_s)
        self.num_prefill_tokens += draft.num_prefill_tokens
        self.step_s += seconds
        self.histograms["iteration_tokens_total"].add(draft.num_decodes + draft.num_prefill_tokens)
        self.histograms["step_time_seconds"].add(seconds)
        self._add("step_time_predicted_seconds", draft.predicted_s)

    @_harmless
    def on_step(self, num_tokens: int, now: float) -> None:
        """A step's tokens were taken in, as many as somebody wants."""
        self.num_generated_tokens += num_tokens
        num_decoded = num_tokens - self._first_tokens - self._num_returned
        if num_decoded > 0 and self._answered_s is not None:
            self.histograms["inter_token_latency_seconds"].add(now - self._answered_s, num_decoded)
        self._answered_s = now

    @_harmless
    def on_copy_done(self, done: CopyDone) -> None:
        """A copy between the tiers has ended."""
        counts = self.copies[done.direction]
        counts.num_copies += 1
        counts.num_failed += not done.ok
        counts.num_bytes += max(0, done.num_bytes) if done.ok else 0
        counts.seconds += max(0.0, done.seconds)
        counts.waited_s += max(0.0, done.waited_s)
