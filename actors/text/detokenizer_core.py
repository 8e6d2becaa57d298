"""What the Detokenizer decides, without its channels: tokens and ends in, text and terminals out.

A request is known here from its `Open` to its terminal, and each of its sequences to its own end. Whatever happens,
each sequence that opened ends once, and the end of the last one is the request's one terminal:

| what happens | the sequence's end | also |
| --- | --- | --- |
| a stop string is complete | "stop", the string | `Abort(stop)` of it, unless the scheduler ended it too |
| the scheduler ends it | the scheduler's reason | |
| its request is refused (or aborted while it waited) | "error" (or "abort") | |
| its text raises | "error" | `Abort(error)` of it, unless the scheduler ended it too |

Anything that arrives for a request after its terminal is dropped: ids are never reused, so the last
`REMEMBERED` closed ones are kept to tell a late message from a request that never opened.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

from tokenizers import Tokenizer

from ...protocol.errors import problem_of
from ...protocol.ids import RequestId
from ...protocol.messages import ALL_SEQUENCES, Abort, Open, Refused, SequenceEnd, TextDelta, TokenLogprobs, TokensSampled
from ...protocol.sampling import FinishReason
from .decode import Vocabulary
from .live import LiveRequest

REMEMBERED = 4096
"""Closed requests that are remembered; more than can end while a message is under way."""

NOTHING: list[TokenLogprobs] = []

Key = tuple[RequestId, int]
"""A sequence: its request and its index there."""


class DetokenizerCore:
    """The state table and rules of the Detokenizer. `len` is the number of live requests.

    A core that takes another's place is told which requests are `closed`, and which are `awaited`: they will be
    opened again, and what is said of them before is left out. Of those it is told which sequences have ended.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        closed: Iterable[RequestId] = (),
        awaited: Mapping[RequestId, Collection[int]] | None = None,
    ) -> None:
        self._vocabulary = Vocabulary(tokenizer)
        self._live: dict[RequestId, LiveRequest] = {}
        self._closed: OrderedDict[RequestId, None] = OrderedDict.fromkeys(closed)
        self._awaited = dict(awaited or {})

    def __len__(self) -> int:
        return len(self._live)

    def on_tokens(self, message: TokensSampled) -> tuple[list[TextDelta], list[Abort]]:
        """Take a step's tokens: requests that open, then tokens, then ends. One delta a sequence at most."""
        deltas: list[TextDelta] = []
        aborts: list[Abort] = []
        for opening in message.opened:
            self._open(opening, message.ended, deltas, aborts)
        for request_id, num_preemptions in message.preempted:
            if request_id in self._live:
                self._live[request_id].num_preemptions = num_preemptions
        for part in message.prompts:
            if part.request_id in self._live:
                self._live[part.request_id].learn(part.entries)
        ends = self._ends(message.ended, deltas)
        logprobs = _logprobs_by_sequence(message)
        at = message.sampled_s
        for request_id, index, token_ids in _by_sequence(message, ends):
            live = self._live.get(request_id)
            if live is None or index not in live.machines:
                continue
            end = ends.get((request_id, index)) if ends else None
            details = logprobs.get((request_id, index), NOTHING) if logprobs else NOTHING
            try:
                delta = live.advance(index, token_ids, details, end, at)
            except Exception as error:
                # One sequence's text must not stop the others': its end carries the error.
                delta = live.failed(index, token_ids, problem_of(error), at)
            deltas.append(delta)
            if delta.finish_reason is None:
                continue
            if end is None:
                reason = "error" if delta.finish_reason == "error" else "stop"
                aborts.append(Abort(request_id, reason, index if live.num_sequences > 1 else None))
            if delta.is_terminal:
                self._close(request_id)
        return deltas, aborts

    def on_refused(self, message: Refused) -> list[TextDelta]:
        """End a request that did not open, or one that did: "error" with a problem, "abort" without."""
        request_id, problem = message.request_id, message.problem
        if request_id in self._closed:
            return []
        live = self._live.get(request_id)
        self._close(request_id)
        if live is not None:
            return live.refused(problem)
        reason: FinishReason = "abort" if problem is None else "error"
        return [TextDelta(request_id, "", [], reason, problem.message if problem else None, problem)]

    def _ends(self, ended: list[SequenceEnd], deltas: list[TextDelta]) -> dict[Key, SequenceEnd]:
        """Ends by sequence, that of a whole request at each which has not ended. Those of requests that never opened are
        added to `deltas`.
        """
        ends: dict[Key, SequenceEnd] = {}
        for end in ended:
            live = self._live.get(end.request_id)
            if live is None:
                if end.request_id not in self._awaited:
                    deltas += self.on_refused(Refused(end.request_id, end.problem))
            elif end.index == ALL_SEQUENCES:
                for index in live.machines:
                    ends.setdefault((end.request_id, index), end)
            else:
                ends[end.request_id, end.index] = end
        return ends

    def _open(self, opening: Open, ended: list[SequenceEnd], deltas: list[TextDelta], aborts: list[Abort]) -> None:
        request_id = opening.request_id
        if request_id in self._live or request_id in self._closed:
            return
        have_ended = self._awaited.pop(request_id, ())
        try:
            self._live[request_id] = LiveRequest(self._vocabulary, opening, ended=have_ended)
        except Exception as error:
            problem = problem_of(error)
            deltas.append(TextDelta(request_id, "", [], "error", problem.message, problem, opening.num_cached_tokens))
            self._close(request_id)
            if all(end.request_id != request_id for end in ended):
                aborts.append(Abort(request_id, "error"))

    def _close(self, request_id: RequestId) -> None:
        self._live.pop(request_id, None)
        self._closed[request_id] = None
        if len(self._closed) > REMEMBERED:
            self._closed.popitem(last=False)


def _by_sequence(message: TokensSampled, ends: Iterable[Key]) -> list[tuple[RequestId, int, list[int]]]:
    """The message's ids by sequence, in their order; an end without ids has an empty list."""
    request_ids, token_ids = message.request_ids, message.token_ids
    if not ends and not message.indices and len(set(request_ids)) == len(request_ids):
        return [(request_id, 0, [token_id]) for request_id, token_id in zip(request_ids, token_ids, strict=True)]
    grouped: dict[Key, list[int]] = {}
    indices = message.indices or [0] * len(token_ids)
    for key, token_id in zip(zip(request_ids, indices, strict=True), token_ids, strict=True):
        grouped.setdefault(key, []).append(token_id)
    for key in ends:
        grouped.setdefault(key, [])
    return [(request_id, index, given) for (request_id, index), given in grouped.items()]


def _logprobs_by_sequence(message: TokensSampled) -> dict[Key, list[TokenLogprobs]]:
    """What the message says of its ids' probabilities, by sequence; nothing where nobody asks."""
    grouped: dict[Key, list[TokenLogprobs]] = {}
    if message.logprobs:
        indices = message.indices or [0] * len(message.token_ids)
        for key, details in zip(zip(message.request_ids, indices, strict=True), message.logprobs, strict=True):
            if details is not None:
                grouped.setdefault(key, []).append(details)
    return grouped
