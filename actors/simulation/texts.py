"""The detokenizer as the scheduler knows it: what it is told, what it says back, and that it may crash at any message.

It makes no text. A "stop string" is complete at two tokens whose sum is a multiple of a visitor's `text_stop`. The
rest is the actor's behaviour (`actors/detokenizer.py`): the one terminal of a request is said here; `Closed` follows
it; a core made anew asks for every open request again (`Resend`) and hands nothing over twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...protocol.ids import RequestId
from ...protocol.messages import (
    ALL_SEQUENCES,
    Abort,
    Closed,
    Open,
    Refused,
    Resend,
    SequenceEnd,
    TextDelta,
    TokensSampled,
)
from ...protocol.sampling import FinishReason

Reply = Abort | Closed | Resend
Key = tuple[RequestId, int]


class Texts:
    """`text_stops` are the visitors' stops. What it has to say is in `deltas` and `replies` until it is taken."""

    def __init__(self, text_stops: Mapping[RequestId, int]) -> None:
        self._text_stops = text_stops
        self._live: dict[RequestId, dict[int, list[int]]] = {}  # tokens of the sequences that have not ended
        self._told: dict[RequestId, dict[int, tuple[int, bool]]] = {}  # tokens handed over, and whether it has ended
        self._over: set[RequestId] = set()
        self._heard: dict[Key, int] = {}  # tokens that are said again and not handed over again
        self._asked: set[RequestId] = set()
        self._num_sequences: dict[RequestId, int] = {}
        self._deltas: list[TextDelta] = []
        self._replies: list[Reply] = []

    def __len__(self) -> int:
        return len(self._live) + len(self._told)

    def take(self) -> tuple[list[TextDelta], list[Reply]]:
        """What is for the frontend, and what for the scheduler, since the last call."""
        deltas, self._deltas = self._deltas, []
        replies, self._replies = self._replies, []
        return deltas, replies

    # ---- messages -------------------------------------------------------------------------------

    def on_message(self, message: TokensSampled | Refused) -> None:
        """The scheduler says something."""
        if isinstance(message, Refused):
            if message.request_id not in self._over:
                self._refuse(message.request_id, "abort" if message.problem is None else "error")
            return
        for opening in message.opened:
            self._open(opening)
        ends = self._ends(message.ended)
        for key, tokens in _by_sequence(message, ends).items():
            live = self._live.get(key[0])
            if live is not None and key[1] in live:
                self._advance(key, tokens, ends.get(key))

    def crash(self, message: TokensSampled | Refused) -> None:
        """It crashes while it handles `message`, which nobody handles again, and a new one takes its place."""
        opened = message.opened if isinstance(message, TokensSampled) else []
        for opening in opened:
            if opening.request_id not in self._over:
                self._told.setdefault(opening.request_id, {})
                self._num_sequences[opening.request_id] = opening.params.n
        self._live.clear()
        self._heard = {
            (request, index): count
            for request, told in self._told.items()
            for index, (count, has_ended) in told.items()
            if not has_ended
        }
        self._asked.difference_update(opening.request_id for opening in opened)
        self._replies += [Resend(request) for request in self._told if request not in self._asked]
        self._asked.update(self._told)
        for request, reason in _unopened(message):
            if request not in self._told and request not in self._over:
                self._refuse(request, reason)

    # ---- pieces ---------------------------------------------------------------------------------

    def _open(self, opening: Open) -> None:
        request = opening.request_id
        self._asked.discard(request)
        if request in self._live or request in self._over:
            return
        told = self._told.setdefault(request, {})
        self._num_sequences[request] = opening.params.n
        ended = {index for index, (_, has_ended) in told.items() if has_ended}
        self._live[request] = {index: [] for index in range(opening.params.n) if index not in ended}

    def _ends(self, ended: list[SequenceEnd]) -> dict[Key, SequenceEnd]:
        ends: dict[Key, SequenceEnd] = {}
        for end in ended:
            live = self._live.get(end.request_id)
            if live is None:
                if end.request_id not in self._told and end.request_id not in self._over:
                    self._refuse(end.request_id, end.finish_reason)
            elif end.index == ALL_SEQUENCES:
                for index in live:
                    ends.setdefault((end.request_id, index), end)
            else:
                ends[end.request_id, end.index] = end
        return ends

    def _advance(self, key: Key, tokens: list[int], end: SequenceEnd | None) -> None:
        request, index = key
        text, taken = self._live[request][index], 0
        reason: FinishReason | None = None
        for token in tokens:
            text.append(token)
            taken += 1
            if self._is_stop(request, text):
                reason = "stop"
                break
        if reason is not None and end is None:
            self._replies.append(Abort(request, "stop", index if self._num_sequences[request] > 1 else None))
        if reason is None and end is not None:
            reason = end.finish_reason
        self._hand_over(key, tokens[:taken], reason)

    def _is_stop(self, request: RequestId, text: list[int]) -> bool:
        divisor = self._text_stops.get(request)
        return divisor is not None and len(text) > 1 and (text[-1] + text[-2]) % divisor == 0

    def _hand_over(self, key: Key, tokens: list[int], reason: FinishReason | None) -> None:
        request, index = key
        fresh = tokens[self._heard.pop(key, 0) :]
        if reason is not None:
            del self._live[request][index]
        num_left = len(self._live[request])
        if not fresh and reason is None:
            return
        self._deltas.append(TextDelta(request, "", fresh, reason, index=index, num_left=0 if reason is None else num_left))
        before = self._told[request].get(index, (0, False))[0]
        self._told[request][index] = (before + len(fresh), reason is not None)
        if reason is not None and not num_left:
            self._close(request)

    def _refuse(self, request: RequestId, reason: FinishReason) -> None:
        self._deltas.append(TextDelta(request, "", [], reason))
        self._close(request)

    def _close(self, request: RequestId) -> None:
        self._live.pop(request, None)
        self._told.pop(request, None)
        self._over.add(request)
        self._replies.append(Closed([request]))


def _by_sequence(message: TokensSampled, ends: Mapping[Key, SequenceEnd]) -> dict[Key, list[int]]:
    grouped: dict[Key, list[int]] = {}
    indices = message.indices or [0] * len(message.token_ids)
    for request, index, token in zip(message.request_ids, indices, message.token_ids, strict=True):
        grouped.setdefault((request, index), []).append(token)
    for key in ends:
        grouped.setdefault(key, [])
    return grouped


def _unopened(message: TokensSampled | Refused) -> list[tuple[RequestId, FinishReason]]:
    if isinstance(message, Refused):
        return [(message.request_id, "abort" if message.problem is None else "error")]
    return [(end.request_id, end.finish_reason) for end in message.ended]
