"""Tokens of requests that have ended, kept until the detokenizer says that their terminal is out.

A detokenizer that crashed asks for tokens again (`Resend`): for running requests the sequences have them,
for ended ones this table.
"""

from __future__ import annotations

from ...protocol.ids import RequestId, incarnation_of
from ...protocol.messages import TokensSampled
from .request import Request


class Histories:
    """Ended and not yet closed requests."""

    def __init__(self) -> None:
        self._ended: dict[RequestId, TokensSampled] = {}

    def __len__(self) -> int:
        return len(self._ended)

    def keep(self, request: Request, now: float) -> None:
        """The last sequence of a request has ended."""
        told = replay(request, now)
        if told is not None:
            self._ended[request.admit.request_id] = told

    def close(self, request_id: RequestId) -> None:
        """Its terminal is out. Ids that are not known are a no-op."""
        self._ended.pop(request_id, None)

    def close_all(self, incarnation: int) -> None:
        """The frontend that made them is gone."""
        self._ended = {key: told for key, told in self._ended.items() if incarnation_of(key) != incarnation}

    def get(self, request_id: RequestId) -> TokensSampled | None:
        """What its detokenizer was told, from the beginning."""
        return self._ended.get(request_id)


def replay(request: Request, now: float) -> TokensSampled | None:
    """All that has been sampled for a request, as one message; None before its first token."""
    if request.opening is None:
        return None
    token_ids: list[int] = []
    indices: list[int] = []
    for seq in request.sequences:
        tokens = seq.log.tolist(seq.num_prompt_tokens)
        token_ids += tokens
        indices += [seq.index] * len(tokens)
    request_id = request.admit.request_id
    return TokensSampled(
        [request_id] * len(token_ids),
        token_ids,
        now,
        opened=[request.opening],
        ended=list(request.ends),
        preempted=[(request_id, request.num_preemptions)],
        indices=indices if len(request.sequences) > 1 else [],
        logprobs=[details for seq in request.sequences for details in seq.logprobs],
        prompts=request.prompts(),
    )
