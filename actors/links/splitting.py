"""A step's tokens, by the frontend whose requests they are for."""

from __future__ import annotations

from ...protocol.ids import RequestId, incarnation_of
from ...protocol.messages import TokensSampled


def split(message: TokensSampled) -> dict[int, TokensSampled]:
    """Incarnation -> its part of the message. Order is kept; a message for one frontend is that part itself."""
    owners = [incarnation_of(request_id) for request_id in message.request_ids]
    everybody = {*owners}
    everybody.update(incarnation_of(opening.request_id) for opening in message.opened)
    everybody.update(incarnation_of(end.request_id) for end in message.ended)
    everybody.update(incarnation_of(request_id) for request_id, _ in message.preempted)
    if len(everybody) <= 1:
        return dict.fromkeys(everybody, message)
    rows: dict[int, list[int]] = {owner: [] for owner in everybody}
    for row, owner in enumerate(owners):
        rows[owner].append(row)
    return {owner: _part(message, owner, rows[owner]) for owner in everybody}


def _part(message: TokensSampled, owner: int, rows: list[int]) -> TokensSampled:
    def is_its(request_id: RequestId) -> bool:
        return incarnation_of(request_id) == owner

    return TokensSampled(
        [message.request_ids[row] for row in rows],
        [message.token_ids[row] for row in rows],
        message.sampled_s,
        opened=[opening for opening in message.opened if is_its(opening.request_id)],
        ended=[end for end in message.ended if is_its(end.request_id)],
        preempted=[told for told in message.preempted if is_its(told[0])],
        indices=[message.indices[row] for row in rows] if message.indices else [],
        logprobs=[message.logprobs[row] for row in rows] if message.logprobs else [],
        prompts=[part for part in message.prompts if is_its(part.request_id)],
    )
