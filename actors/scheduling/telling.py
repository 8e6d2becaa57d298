"""What has been decided and has happened, until somebody takes it: messages for the detokenizer, facts for the logs."""

from __future__ import annotations

from msgspec.structs import replace

from ...protocol.errors import Problem
from ...protocol.ids import RequestId
from ...protocol.messages import Open, PromptLogprobs, Refused, SequenceEnd, TokenLogprobs, TokensSampled
from .cost import Choice, Decision
from .counts import Counts
from .histories import Histories, replay
from .reports import Finished, HostHit, Paused, Preempted, Report
from .request import Request
from .sequence import Sequence


class Sampled:
    """The tokens of one step as columns, while they are being taken in."""

    def __init__(self, *, has_logprobs: bool) -> None:
        self.request_ids: list[RequestId] = []
        self.token_ids: list[int] = []
        self.indices: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.opened: list[Open] = []
        self.prompts: list[PromptLogprobs] = []
        self._has_logprobs = has_logprobs

    def add(self, seq: Sequence, token: int, details: TokenLogprobs | None) -> None:
        """One token of `seq`."""
        self.request_ids.append(seq.request_id)
        self.token_ids.append(token)
        self.indices.append(seq.index)
        if self._has_logprobs:
            self.logprobs.append(details)


class Telling:
    """Collects, in order. `histories` keeps what was said of requests that have ended, in case it is asked for again."""

    def __init__(self) -> None:
        self.histories = Histories()
        self.counts = Counts()
        self.num_host_hits = {"fetch": 0, "recompute": 0}
        self._refused: list[Refused] = []
        self._ended: list[SequenceEnd] = []
        self._sampled: list[TokensSampled] = []
        self._preempted: dict[RequestId, int] = {}
        self._reports: list[Report] = []

    # ---- for the detokenizer --------------------------------------------------------------------

    def refuse(self, request_id: RequestId, problem: Problem | None) -> None:
        """A request ends that was never queued."""
        self._refused.append(Refused(request_id, problem))
        if problem is not None:
            self.counts.on_refused(problem.kind)

    def say(self, sampled: Sampled, now: float) -> None:
        """A step's tokens, and the ends that came with them."""
        if not sampled.token_ids and not self._ended:
            return
        ended, self._ended = self._ended, []
        preempted, self._preempted = list(self._preempted.items()), {}
        message = TokensSampled(
            sampled.request_ids,
            sampled.token_ids,
            now,
            opened=sampled.opened,
            ended=ended,
            preempted=preempted,
            indices=sampled.indices if any(sampled.indices) else [],
            logprobs=sampled.logprobs,
            prompts=sampled.prompts,
        )
        self._sampled.append(message)

    def end(self, request: Request, end: SequenceEnd, now: float) -> None:
        """A sequence of a request has ended, or all have; with the last one the request's account is closed."""
        finished: Finished | None = None
        if not request.num_live and not request.admit.holds:
            finished = Finished.of(request, end.finish_reason, now, end.problem)
            end = replace(end, journey=finished.journey)
        self._ended.append(end)
        request.ends.append(end)
        if request.num_live:
            return
        self._preempted.pop(end.request_id, None)
        self.histories.keep(request, now)
        if finished is not None:
            self.counts.on_finished(finished)
            self._reports.append(finished)

    def repeat(self, request: Request | None, request_id: RequestId, now: float) -> None:
        """Say everything of a request again, running (`request`) or ended."""
        told = self.histories.get(request_id) if request is None else replay(request, now)
        if told is not None:
            self._sampled.append(told)

    def take_outputs(self, now: float) -> list[TokensSampled | Refused]:
        """Messages for the detokenizer, in order, since the last call."""
        outputs: list[TokensSampled | Refused] = [*self._refused, *self._sampled]
        if self._ended:
            outputs.append(TokensSampled([], [], now, ended=self._ended))
        self._refused, self._sampled, self._ended = [], [], []
        return outputs

    # ---- for the logs ---------------------------------------------------------------------------

    def preempted(self, request: Request, seq: Sequence, freed: int, decision: Decision) -> None:
        """`seq` has given its blocks up."""
        self._preempted[seq.request_id] = request.num_preemptions
        self.counts.on_preempted(decision)
        mode, swap_s, recompute_s, reason = decision
        self._reports.append(
            Preempted(seq.request_id, mode, len(seq.log), freed, seq.num_preemptions, swap_s, recompute_s, reason)
        )

    def host_hit(self, seq: Sequence, choice: Choice) -> None:
        """`seq` was admitted with part of its tokens on the host."""
        self.num_host_hits["fetch" if choice.fetch else "recompute"] += 1
        self._reports.append(HostHit(seq.request_id, choice.fetch, choice.num_tokens, choice.fetch_s, choice.recompute_s))

    def paused(self, seq: Sequence) -> None:
        """The reader of `seq` is behind."""
        self._reports.append(Paused(seq.request_id, seq.num_output_tokens))

    def take_reports(self) -> list[Report]:
        """Facts for the logs since the last call."""
        reports, self._reports = self._reports, []
        return reports
