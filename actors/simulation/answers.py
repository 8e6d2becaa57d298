"""What is said of each request: it opens, gives what it gives alone, token for token, and ends once, for a good reason.

The reference is drawn token by token from the hash that the simulated device uses in place of a model, over the tokens
alone: no memory, no batch, no scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...gpu.simulated import SimulatedExecutor
from ...protocol.ids import RequestId
from ...protocol.messages import ALL_SEQUENCES, Admit, Open, Refused, SequenceEnd, TextDelta, TokensSampled
from .guest import Guest
from .violation import Violation

OUTPUT, TERMINAL, REASON = "outputs", "one terminal", "reasons"
Key = tuple[RequestId, int]


class Answers:
    """Of every request that was admitted: what the scheduler said of it, and what its visitor was handed."""

    def __init__(self, device: SimulatedExecutor, max_length: int) -> None:
        self._device = device
        self._max_length = max_length
        self._references: dict[Key, list[int]] = {}
        self.admits: dict[RequestId, Admit] = {}
        self.given: dict[Key, list[int]] = {}
        """Tokens that the scheduler has said, each once."""
        self.opens: dict[RequestId, Open] = {}
        self.ends: dict[Key, SequenceEnd] = {}
        self.over: set[RequestId] = set()
        self.resent: set[RequestId] = set()
        """Requests of which everything is said again."""
        self.stopped: set[Key] = set()
        self.aborted: set[RequestId] = set()
        self.excuses: dict[RequestId, str] = {}
        """Requests that may end with an error, and why."""

    # ---- what is said to the detokenizer --------------------------------------------------------

    def said(self, message: TokensSampled | Refused) -> None:
        """The scheduler sends this."""
        if isinstance(message, Refused):
            self._is_over(message.request_id)
            self.over.add(message.request_id)
            return
        if self.is_replay(message):
            self._check_replay(message)
            return
        for opening in message.opened:
            self._open(opening)
        for key, token in _tokens(message):
            self._token(key, token)
        self._check_logprobs(message)
        for end in message.ended:
            self._end(end)

    def _open(self, opening: Open) -> None:
        if opening.request_id in self.opens:
            raise Violation(TERMINAL, f"request {opening.request_id} opens twice")
        self._is_over(opening.request_id)
        if not 0 <= opening.num_cached_tokens < opening.num_prompt_tokens:
            raise Violation(
                "hits",
                f"request {opening.request_id}: {opening.num_cached_tokens} tokens of "
                f"{opening.num_prompt_tokens} cached: the last is always computed",
            )
        self.opens[opening.request_id] = opening

    def _token(self, key: Key, token: int) -> None:
        request, index = key
        self._is_over(request)
        if key in self.ends:
            raise Violation(TERMINAL, f"sequence {index} of request {request} goes on after its end")
        if request not in self.opens:
            raise Violation(TERMINAL, f"request {request} gives a token and has not opened")
        given = self.given.setdefault(key, [])
        reference = self.reference(key)
        if len(given) >= len(reference) or reference[len(given)] != token:
            expected = reference[len(given)] if len(given) < len(reference) else "its end"
            raise Violation(
                OUTPUT, f"request {request}, sequence {index}: token {len(given)} is {token}, alone it is {expected}"
            )
        given.append(token)

    def _check_logprobs(self, message: TokensSampled) -> None:
        """Where they are asked for they stand beside each token, and are that token's."""
        column = message.logprobs or [None] * len(message.token_ids)
        for request, token, details in zip(message.request_ids, message.token_ids, column, strict=True):
            wanted = self.admits[request].params.logprobs is not None
            if wanted != (details is not None) or (details is not None and details.token_ids[0] != token):
                raise Violation(OUTPUT, f"request {request}: beside token {token} stand the logprobs {details}")

    def _end(self, end: SequenceEnd) -> None:
        request = end.request_id
        self._is_over(request)
        everybody = range(self.admits[request].params.n)
        if end.index != ALL_SEQUENCES:
            if (request, end.index) in self.ends:
                raise Violation(TERMINAL, f"sequence {end.index} of request {request} ends twice")
            self._check_reason((request, end.index), end)
            self.ends[request, end.index] = end
        else:
            for index in everybody:
                if (request, index) not in self.ends:
                    self._check_reason((request, index), end)
                    self.ends[request, index] = end
        if all((request, index) in self.ends for index in everybody):
            self.over.add(request)

    def _check_reason(self, key: Key, end: SequenceEnd) -> None:
        request, reason = key[0], end.finish_reason
        given = self.given.get(key, [])
        is_right = {
            "abort": request in self.aborted,
            "error": request in self.excuses,
            "stop": key in self.stopped or (bool(given) and given[-1] in self.admits[request].stop_token_ids),
            "length": given == self.reference(key),
        }[reason]
        if not is_right:
            raise Violation(REASON, f"request {request}, sequence {key[1]} ends with {reason!r} after {len(given)} tokens")

    def _is_over(self, request: RequestId) -> None:
        if request in self.over:
            raise Violation(TERMINAL, f"request {request} goes on after its end")

    def is_replay(self, message: TokensSampled) -> bool:
        """Whether a message says again what was said of one request before, because that was asked for."""
        opened = [opening.request_id for opening in message.opened]
        return len(opened) == 1 and opened[0] in self.resent and opened[0] in self.opens

    def _check_replay(self, message: TokensSampled) -> None:
        """All of it, in its order, and nothing else."""
        request = message.opened[0].request_id
        self.resent.discard(request)
        said: dict[Key, list[int]] = {}
        for key, token in _tokens(message):
            said.setdefault(key, []).append(token)
        before = {key: tokens for key, tokens in self.given.items() if key[0] == request}
        self._check_logprobs(message)
        if said != before:
            raise Violation(OUTPUT, f"request {request}: said again, {said} is not what was said before, {before}")

    # ---- what visitors are handed ---------------------------------------------------------------

    def handed_over(self, guest: Guest, delta: TextDelta) -> None:
        """A visitor is about to take `delta`."""
        key = (delta.request_id, delta.index)
        if guest.num_terminals:
            raise Violation(TERMINAL, f"request {delta.request_id}: its visitor hears of it after the terminal")
        told = [*guest.given[delta.index], *delta.token_ids]
        if told != self.given.get(key, [])[: len(told)]:
            raise Violation(OUTPUT, f"request {delta.request_id}: its visitor is handed {told}")

    def at_the_end(self, guest: Guest) -> None:
        """All is over: one terminal, and all of what it gives alone, unless something came between."""
        request = guest.request_id
        if guest.num_terminals != 1:
            raise Violation(TERMINAL, f"request {request} has had {guest.num_terminals} terminals")
        for index, reason in guest.reasons.items():
            if request not in self.opens or reason not in ("stop", "length"):
                continue
            expected = self._until_text_stop(guest, self.reference((request, index)))
            if guest.given[index] != expected:
                raise Violation(
                    OUTPUT, f"request {request}, sequence {index} ({reason}) gave {guest.given[index]}, alone {expected}"
                )

    @staticmethod
    def _until_text_stop(guest: Guest, tokens: list[int]) -> list[int]:
        divisor = guest.visitor.text_stop
        if divisor is not None:
            for end in range(2, len(tokens) + 1):
                if (tokens[end - 1] + tokens[end - 2]) % divisor == 0:
                    return tokens[:end]
        return tokens

    # ---- the reference --------------------------------------------------------------------------

    def reference(self, key: Key) -> list[int]:
        """What a sequence gives alone, to its stop id or its length."""
        found = self._references.get(key)
        if found is None:
            admit = self.admits[key[0]]
            tokens = self._device.reference(admit.token_ids, admit.params, self.most_tokens(key[0]), index=key[1])
            found = self._references[key] = _until(tokens, admit.stop_token_ids)
        return found

    def most_tokens(self, request: RequestId) -> int:
        """Tokens that each sequence of a request may give at most."""
        admit = self.admits[request]
        room, wanted = max(0, self._max_length - len(admit.token_ids)), admit.params.max_tokens
        return room if wanted is None else min(room, wanted)

    def longest(self, request: RequestId) -> int:
        """Prompt and output of a request together, at most."""
        return min(self._max_length, len(self.admits[request].token_ids) + self.most_tokens(request))


def _tokens(message: TokensSampled) -> Iterator[tuple[Key, int]]:
    indices = message.indices or [0] * len(message.token_ids)
    return zip(zip(message.request_ids, indices, strict=True), message.token_ids, strict=True)


def _until(tokens: list[int], stops: Iterable[int]) -> list[int]:
    ends = [place for place, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens
