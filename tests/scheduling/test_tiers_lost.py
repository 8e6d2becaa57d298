"""The device dies, with both tiers, while blocks move between them: nobody is told, and everything is computed again."""

from __future__ import annotations

import pytest

from repertory.protocol.messages import CopyDirection

from .lossy import LossyWorld, run_to_the_end, turn


def pressed(in_flight: int, **config: object) -> LossyWorld:
    """A prompt that is served once, and two requests that are too much for the device together."""
    world = LossyWorld(
        blocks=12, host_blocks=60, preemption_mode="swap", max_steps_in_flight=in_flight, credit_window=1024, **config
    )
    world.without_reserve()
    for number in (1, 2, 3):
        world.submit([number] * 12, max_tokens=24)
    return world


def hold(world: LossyWorld, lane: CopyDirection) -> None:
    """Turn, with one lane standing still, until a copy waits in it."""
    for _ in range(500):
        if world.copies[lane]:
            return
        world.plan()
        if world.copies[lane]:
            return
        if world.in_flight and not world._unmet(world.in_flight[0]):
            world.finish()
        while world.copy("in" if lane == "out" else "out"):
            pass
    raise AssertionError("no copy came")


@pytest.mark.parametrize("lane", ["in", "out"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_device_dies_with_copies_in_flight(lane: CopyDirection, in_flight: int) -> None:
    world = pressed(in_flight)
    hold(world, lane)
    world.lose()
    assert not world.core.queues.fetching
    assert world.core.num_copies == 0
    stats = world.core.stats()
    assert stats.host_blocks.free == stats.host_blocks.total == 60
    world.restart()
    run_to_the_end(world)
    assert not world.failed()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_one_that_was_fetching_was_present_at_no_death(in_flight: int) -> None:
    world = pressed(in_flight)
    hold(world, "in")
    fetching = {seq.request_id for seq in world.core.queues.fetching.values()}
    assert fetching
    world.lose()
    assert not fetching & world.deaths.keys()
    world.restart()
    run_to_the_end(world)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_it_dies_again_and_again_while_blocks_move(in_flight: int) -> None:
    world = pressed(in_flight)
    for lane in ("out", "in", "out", "in"):
        hold(world, lane)
        world.relive()
        turn(world)
        while world.in_flight:
            world.finish()
    run_to_the_end(world)
    assert not world.failed()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_killer_among_the_swapped_is_found_and_the_others_are_not_blamed(in_flight: int) -> None:
    world = pressed(in_flight)
    hold(world, "in")
    killer = next(iter(world.core.queues.fetching.values())).request_id
    world.killers.add(killer)
    run_to_the_end(world)
    assert world.failed() == [killer]
