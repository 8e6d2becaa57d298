"""Who there is: the requests that have not ended, and their sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from ...protocol.ids import RequestId, SequenceId, incarnation_of
from ...protocol.messages import Admit
from ...radix.cache import KVCache
from .journeys import Own, Stalls, Traveller
from .request import Request
from .sequence import Sequence


class RequestTable:
    """Makes sequences, numbers them, and finds them. `max_length` is in tokens, `credit_window` in output tokens."""

    def __init__(self, *, max_length: int, credit_window: int, stalls: Stalls) -> None:
        self.sequences: dict[SequenceId, Sequence] = {}
        self._requests: dict[RequestId, Request] = {}
        self._max_length = max_length
        self._credit_window = credit_window
        self._stalls = stalls
        self._last_seq_id = SequenceId(0)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._requests

    def __getitem__(self, request_id: RequestId) -> Request:
        return self._requests[request_id]

    def get(self, request_id: RequestId) -> Request | None:
        """The request while it lives."""
        return self._requests.get(request_id)

    def requests(self) -> Iterable[Request]:
        """All of them, in the order in which they came."""
        return self._requests.values()

    def made_by(self, incarnation: int) -> list[Request]:
        """Requests of one frontend."""
        return [request for request_id, request in self._requests.items() if incarnation_of(request_id) == incarnation]

    def sequence(self, request_id: RequestId, index: int) -> Sequence | None:
        """One sequence of a request that lives, which may have ended itself."""
        request = self._requests.get(request_id)
        return request.sequences[index] if request is not None and index < len(request.sequences) else None

    def add(self, message: Admit, rank_class: int, cache: KVCache) -> Request:
        """Take a request in, with its sequences: neighbours in order, each with a holding of its own."""
        request = self._requests[message.request_id] = Request(message)
        leader, own = self._followed(message), Own()
        for index in range(message.params.n):
            seq = self._new(message, rank_class, index, leader, cache, own)
            leader = leader or seq
            request.add(seq)
        return request

    def remove(self, seq: Sequence) -> None:
        """A sequence has ended. Its request goes with the last of them."""
        del self.sequences[seq.seq_id]
        request = self._requests[seq.request_id]
        request.num_live -= 1
        if not request.num_live:
            del self._requests[seq.request_id]

    def problems(self, queued: Collection[Sequence], cache: KVCache) -> list[str]:
        """What does not add up between this table, the queues and the cache, in words."""
        found, sequences = [], self.sequences
        if {seq.seq_id for seq in queued} != set(sequences) or len(queued) != len(sequences):
            found.append(f"{len(sequences)} sequences in the table, {len(queued)} in the queues")
        live = {request_id: request.num_live for request_id, request in self._requests.items()}
        if Counter(seq.request_id for seq in sequences.values()) != live:
            found.append("the request table and the sequence table differ")
        if {holding.seq_id for holding in cache.holdings()} != set(sequences):
            found.append("a holding without a sequence, or the reverse")
        return found

    def _followed(self, message: Admit) -> Sequence | None:
        """The sequence whose KV the request goes on from, if it is still here and it really does."""
        followed = None if message.follows is None else self._requests.get(message.follows)
        if followed is None or followed.admit.cache_salt != message.cache_salt:
            return None
        start = followed.admit.token_ids
        # By more than a token it could wait for what nobody computes.
        goes_on = len(message.token_ids) == len(start) + 1 and message.token_ids[: len(start)] == start
        return followed.sequences[0] if goes_on else None

    def _new(self, message: Admit, rank_class: int, index: int, leader: Sequence | None, cache: KVCache, own: Own) -> Sequence:
        seq_id = self._last_seq_id = SequenceId(self._last_seq_id + 1)
        wanted = message.params.max_tokens
        room = self._max_length if wanted is None else len(message.token_ids) + wanted
        seq = self.sequences[seq_id] = Sequence(
            seq_id,
            message,
            cache.open(seq_id, message.cache_salt),
            max_length=min(self._max_length, room),
            rank=(rank_class, seq_id),
            traveller=Traveller(message.request_id, message.arrival_s, self._stalls, own),
            index=index,
            leader=leader,
        )
        if message.params.output_kind != "final_only":
            seq.credit_length = seq.num_prompt_tokens + self._credit_window
        return seq
