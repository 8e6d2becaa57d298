"""Whole engines, drawn from seeds, under every kind of trouble: no rule of `actors/simulation/checker.py` is ever broken.

A failure prints its seed, the scenario cut down to what it takes, and the last events of that.
"""

from __future__ import annotations

import pytest

from repertory.actors.simulation.drawing import draw
from repertory.actors.simulation.shrinking import failure_of, shrunk
from repertory.actors.simulation.world import World


def check(seeds: range) -> None:
    for seed in seeds:
        failure = failure_of(draw(seed))
        if failure is not None:
            pytest.fail(shrunk(failure).report(), pytrace=False)


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_nothing_is_broken_at_200_seeds(first: int) -> None:
    check(range(first, first + 20))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 6000, 50))
def test_nothing_is_broken_at_5000_seeds(first: int) -> None:
    check(range(first, first + 50))


def test_a_seed_repeats_event_by_event() -> None:
    for seed in (3, 4, 21):
        first, second = World(draw(seed), record=True), World(draw(seed), record=True)
        first.live()
        second.live()
        assert first.story == second.story
        assert first.story


def test_the_seeds_meet_what_they_are_for() -> None:
    """Without this the checks might never see what they are to check."""
    met = set()
    for seed in range(60):
        world = World(draw(seed))
        world.live()
        stats, answers = world.core.stats(), world.checker.answers
        met |= {name for name, count in stats.num_preemptions.items() if count}
        met |= {f"excuse: {why}" for why in answers.excuses.values()}
        met |= {reason for guest in world.guests.values() for reason in guest.reasons.values()}
        met |= {type(report).__name__ for report in world.reports}
        facts = {
            "restart": stats.num_restarts,
            "fetch": stats.swap_in_bytes,
            "failed copy": stats.num_failed_copies,
            "hit": stats.prefix_cache_hits,
            "stop string": answers.stopped,
            "crash of texts": any(fault.kind == "crash" for fault in world.scenario.faults),
        }
        met |= {name for name, fact in facts.items() if fact}
    assert met >= {
        *("recompute", "swap", "restart", "fetch", "failed copy", "hit", "stop string", "crash of texts"),
        *("stop", "length", "abort", "error", "Paused", "Preempted", "HostHit"),
        *("excuse: its row failed", "excuse: its reader was too slow", "excuse: the device died of it"),
    }
