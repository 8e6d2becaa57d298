"""Tokens of requests that have ended, kept until the detokenizer says that their terminal is out.

A detokenizer that crashed asks for tokens again (`Resend`): for running requests the sequence has them,
for ended ones this table.
"""

from __future__ import annotations

from ...protocol.ids import RequestId
from ...protocol.messages import Open, SequenceEnd, TokensSampled
from .sequence import Sequence


class Histories:
    """Ended and not yet closed requests."""

    def __init__(self) -> None:
        self._ended: dict[RequestId, TokensSampled] = {}

    def __len__(self) -> int:
        return len(self._ended)

    def keep(self, seq: Sequence, end: SequenceEnd, now: float) -> None:
        """A request that had opened has ended."""
        if seq.opening is not None:
            self._ended[seq.request_id] = replay(seq, seq.opening, now, end)

    def close(self, request_id: RequestId) -> None:
        """Its terminal is out. Ids that are not known are a no-op."""
        self._ended.pop(request_id, None)

    def get(self, request_id: RequestId) -> TokensSampled | None:
        """What its detokenizer was told, from the beginning."""
        return self._ended.get(request_id)


def replay(seq: Sequence, opening: Open, now: float, end: SequenceEnd | None = None) -> TokensSampled:
    """All that has been sampled for `seq`, as one message."""
    tokens = seq.log.tolist(seq.num_prompt_tokens)
    return TokensSampled(
        [seq.request_id] * len(tokens),
        tokens,
        now,
        opened=[opening],
        ended=[] if end is None else [end],
        preempted=[(seq.request_id, seq.num_preemptions)],
    )
