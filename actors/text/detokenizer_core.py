"""What the Detokenizer decides, without its channels: tokens and ends in, text and terminals out.

A request is known here from its `Open` to its terminal. Whatever happens, each gets one terminal:

| what happens | terminal | also |
| --- | --- | --- |
| a stop string is complete | "stop", the string | `Abort(stop)`, unless the scheduler ended it too |
| the scheduler ends it | the scheduler's reason | |
| it is refused (or aborted while it waited) | "error" (or "abort") | |
| its text raises | "error" | `Abort(error)`, unless the scheduler ended it too |

Anything that arrives for a request after its terminal is dropped: ids are never reused, so the last
`REMEMBERED` closed ones are kept to tell a late message from a request that never opened.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tokenizers import Tokenizer

from ...protocol.errors import Problem, problem_of
from ...protocol.ids import RequestId
from ...protocol.messages import Abort, Metrics, Open, Refused, SequenceEnd, TextDelta, TokensSampled
from ...protocol.sampling import FinishReason
from .decode import Vocabulary
from .machine import TextMachine

REMEMBERED = 4096
"""Closed requests that are remembered; more than can end while a message is under way."""


class DetokenizerCore:
    """The state table and rules of the Detokenizer. `len` is the number of live requests.

    A core that takes another's place is told which requests are `closed`, and which are `awaited`: they will be
    opened again, and what is said of them before is left out.
    """

    def __init__(self, tokenizer: Tokenizer, *, closed: Iterable[RequestId] = (), awaited: Iterable[RequestId] = ()) -> None:
        self._vocabulary = Vocabulary(tokenizer)
        self._live: dict[RequestId, _Live] = {}
        self._closed: OrderedDict[RequestId, None] = OrderedDict.fromkeys(closed)
        self._awaited = set(awaited)

    def __len__(self) -> int:
        return len(self._live)

    def on_tokens(self, message: TokensSampled) -> tuple[list[TextDelta], list[Abort]]:
        """Take a step's tokens: requests that open, then tokens, then ends. One delta a request at most."""
        deltas: list[TextDelta] = []
        aborts: list[Abort] = []
        ends = {end.request_id: end for end in message.ended}
        for opening in message.opened:
            failure = self._open(opening)
            if failure is not None:
                self._add(failure, ends, deltas, aborts)
        for request_id, num_preemptions in message.preempted:
            if request_id in self._live:
                self._live[request_id].num_preemptions = num_preemptions
        for request_id, token_ids in _by_request(message).items():
            live = self._live.get(request_id)
            if live is None:
                if request_id in ends and request_id not in self._awaited:
                    deltas += self.on_refused(Refused(request_id, ends[request_id].problem))  # it never opened
                continue
            try:
                delta = live.advance(token_ids, ends.get(request_id), message.sampled_s)
            except Exception as error:
                # One request's text must not stop the others': its terminal carries the error.
                delta = live.failed(token_ids, problem_of(error), message.sampled_s)
            self._add(delta, ends, deltas, aborts)
        return deltas, aborts

    def on_refused(self, message: Refused) -> list[TextDelta]:
        """End a request that did not open, or one that did: "error" with a problem, "abort" without."""
        request_id, problem = message.request_id, message.problem
        if request_id in self._closed:
            return []
        live = self._live.get(request_id)
        self._close(request_id)
        if live is not None:
            return [live.refused(problem)]
        reason: FinishReason = "abort" if problem is None else "error"
        return [TextDelta(request_id, "", [], reason, problem.message if problem else None, problem)]

    def _open(self, opening: Open) -> TextDelta | None:
        request_id = opening.request_id
        if request_id in self._live or request_id in self._closed:
            return None
        self._awaited.discard(request_id)
        try:
            self._live[request_id] = _Live(TextMachine(self._vocabulary, opening), opening)
        except Exception as error:
            problem = problem_of(error)
            return TextDelta(request_id, "", [], "error", problem.message, problem, opening.num_cached_tokens)
        return None

    def _add(self, delta: TextDelta, ends: dict[RequestId, SequenceEnd], deltas: list[TextDelta], aborts: list[Abort]) -> None:
        deltas.append(delta)
        if delta.finish_reason is None:
            return
        self._close(delta.request_id)
        if delta.request_id not in ends:
            aborts.append(Abort(delta.request_id, "error" if delta.finish_reason == "error" else "stop"))

    def _close(self, request_id: RequestId) -> None:
        self._live.pop(request_id, None)
        self._closed[request_id] = None
        if len(self._closed) > REMEMBERED:
            self._closed.popitem(last=False)


class _Live:
    """A request between its `Open` and its terminal."""

    __slots__ = ("first_token_s", "last_token_s", "machine", "num_preemptions", "opening")

    def __init__(self, machine: TextMachine, opening: Open) -> None:
        self.machine = machine
        self.opening = opening
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.num_preemptions = 0

    def advance(self, token_ids: list[int], end: SequenceEnd | None, sampled_s: float) -> TextDelta:
        """Take ids and perhaps the scheduler's end; a stop string complete by then wins over the end."""
        is_first = self.first_token_s is None
        piece = self.machine.push(token_ids, ends_with_stop_token=end is not None and end.finish_reason == "stop")
        text, num_tokens, stop = piece.text, piece.num_tokens, piece.stop
        if num_tokens:
            self._saw_tokens(sampled_s)
        if stop is None and end is not None:
            rest = self.machine.finish()
            text, stop = text + rest.text, rest.stop
        if num_tokens < len(token_ids):
            token_ids = token_ids[:num_tokens]
        if end is not None:
            self.num_preemptions = end.num_preemptions
        if stop is not None:
            return self._terminal(text, token_ids, "stop", stop_reason=stop, metrics=self._metrics(sampled_s))
        if end is not None:
            stop_reason = end.problem.message if end.problem is not None else end.stop_token_id
            metrics = self._metrics(sampled_s)
            return self._terminal(
                text, token_ids, end.finish_reason, stop_reason=stop_reason, problem=end.problem, metrics=metrics
            )
        return TextDelta(
            self.opening.request_id,
            text,
            token_ids,
            num_cached_tokens=self.opening.num_cached_tokens,
            metrics=self._metrics(None) if is_first else None,
        )

    def failed(self, token_ids: list[int], problem: Problem, sampled_s: float) -> TextDelta:
        """The terminal of a request whose text raised: its ids count, what was held is lost."""
        if token_ids:
            self._saw_tokens(sampled_s)
        metrics = self._metrics(sampled_s)
        return self._terminal("", token_ids, "error", stop_reason=problem.message, problem=problem, metrics=metrics)

    def refused(self, problem: Problem | None) -> TextDelta:
        """The terminal of an open request that is ended from outside, with the text held so far."""
        try:
            text = self.machine.finish().text
        except Exception as error:
            text, problem = "", problem or problem_of(error)
        reason: FinishReason = "abort" if problem is None else "error"
        stop_reason = problem.message if problem is not None else None
        return self._terminal(text, [], reason, stop_reason=stop_reason, problem=problem, metrics=self._metrics(None))

    def _terminal(
        self,
        text: str,
        token_ids: list[int],
        reason: FinishReason,
        *,
        stop_reason: str | int | None,
        metrics: Metrics,
        problem: Problem | None = None,
    ) -> TextDelta:
        opening = self.opening
        return TextDelta(opening.request_id, text, token_ids, reason, stop_reason, problem, opening.num_cached_tokens, metrics)

    def _saw_tokens(self, sampled_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = sampled_s
        self.last_token_s = sampled_s

    def _metrics(self, finished_s: float | None) -> Metrics:
        """`arrival` is when the request was queued: the frontend, which knows better, replaces it."""
        queued_s = self.opening.queued_s
        return Metrics(
            arrival=queued_s,
            queued=queued_s,
            first_scheduled=self.opening.first_scheduled_s,
            first_token=self.first_token_s,
            last_token=self.last_token_s,
            finished=finished_s,
            num_preemptions=self.num_preemptions,
        )


def _by_request(message: TokensSampled) -> dict[RequestId, list[int]]:
    """The message's ids by request, in their order; an end without ids has an empty list."""
    grouped: dict[RequestId, list[int]] = {}
    for request_id, token_id in zip(message.request_ids, message.token_ids, strict=True):
        grouped.setdefault(request_id, []).append(token_id)
    for end in message.ended:
        grouped.setdefault(end.request_id, [])
    return grouped
