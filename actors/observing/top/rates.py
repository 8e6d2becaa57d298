"""What happened between two views of a company."""

from __future__ import annotations

from typing import NamedTuple

from ....protocol.view import CompanyView


class ActorRate(NamedTuple):
    """How busy an actor was: messages/s, and the share of the time that it spent in its handlers (0 to 1)."""

    messages: float
    busy: float


class Rates(NamedTuple):
    """Per second, means, and shares; None where nothing happened that they could be of. Actors by name and process."""

    prompt_tokens: float
    generated_tokens: float
    finished: float
    step_s: float | None
    hit_rate: float | None
    actors: dict[tuple[str, str], ActorRate]


NO_RATES = Rates(0.0, 0.0, 0.0, None, None, {})


def rates_between(before: CompanyView | None, after: CompanyView) -> Rates:
    """The rates; none where the views are of two lives of a core, or of one moment."""
    if before is None or after.at_s <= before.at_s or after.stats.num_steps < before.stats.num_steps:
        return NO_RATES
    seconds = after.at_s - before.at_s
    num_steps = after.stats.num_steps - before.stats.num_steps
    num_queries = after.stats.prefix_cache_queries - before.stats.prefix_cache_queries
    num_hits = after.stats.prefix_cache_hits - before.stats.prefix_cache_hits
    known = {(load.name, load.process): load for load in before.actors}
    actors: dict[tuple[str, str], ActorRate] = {}
    for load in after.actors:
        last = known.get((load.name, load.process))
        if last is not None:
            busy = min(1.0, max(0.0, load.handler_s - last.handler_s) / seconds)
            actors[load.name, load.process] = ActorRate(max(0, load.num_messages - last.num_messages) / seconds, busy)
    return Rates(
        prompt_tokens=(after.num_prefill_tokens - before.num_prefill_tokens) / seconds,
        generated_tokens=(after.num_generated_tokens - before.num_generated_tokens) / seconds,
        finished=(after.num_finished - before.num_finished) / seconds,
        step_s=(after.step_s - before.step_s) / num_steps if num_steps else None,
        hit_rate=num_hits / num_queries if num_queries else None,
        actors=actors,
    )
