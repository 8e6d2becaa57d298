"""Who makes room when memory runs out, and how the one that did comes back."""

from __future__ import annotations

import msgspec
import pytest

from repertory.actors.scheduling.reports import Preempted

from .world import World


def pressed(*lengths: int, blocks: int, max_tokens: int = 40, **config: object) -> World:
    """A world without a reserve in which distinct prompts of these lengths are all running."""
    world = World(blocks=blocks, **config)
    world.without_reserve()
    for number, length in enumerate(lengths):
        world.submit([100 + number] * length, max_tokens=max_tokens)
    return world


def victims(world: World) -> list[int]:
    return [report.request_id for report in world.reports if isinstance(report, Preempted)]


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("budget", [1, 512])
@pytest.mark.parametrize("num_requests", range(2, 9))
def test_requests_that_fit_only_one_at_a_time_all_finish(num_requests: int, budget: int, in_flight: int) -> None:
    world = pressed(
        *range(5, 5 + num_requests), blocks=10, max_tokens=24, max_num_batched_tokens=budget, max_steps_in_flight=in_flight
    )
    world.run()
    world.check_outputs()
    assert sum(world.core.pressure.num_preemptions.values()) <= num_requests * 10
    world.check_nothing_is_left()


def test_the_last_in_order_makes_room_for_those_before_it() -> None:
    world = pressed(4, 4, 4, blocks=6)
    while not victims(world):
        world.step()
    assert victims(world) == [3]
    assert world.running() == [1, 2]
    assert world.preempted() == [3]


def test_the_last_in_order_preempts_itself_and_is_not_run_in_that_step() -> None:
    # The third crosses a block boundary when the others do not.
    world = pressed(3, 3, 4, blocks=3)
    world.step()
    step = world.step()
    assert step is not None
    assert victims(world) == [3]
    assert set(world.rows(step)) == {1, 2}
    world.run()
    world.check_outputs()


def test_the_oldest_is_never_preempted() -> None:
    world = pressed(5, 6, 7, 8, blocks=8, max_tokens=20)
    world.run()
    assert victims(world)
    assert 1 not in victims(world)
    world.check_outputs()


def test_one_that_was_just_brought_back_gets_a_token_before_it_is_chosen_again() -> None:
    world = pressed(4, 4, 4, blocks=7, max_tokens=16, max_num_batched_tokens=1)
    length_at: dict[int, int] = {}
    while len(world.ends) < 3:
        world.step()
        for report in world.reports:
            if isinstance(report, Preempted):
                assert report.num_tokens > length_at.get(report.request_id, 0) or report.num_preemptions == 1
                length_at[report.request_id] = report.num_tokens
        world.reports.clear()
    world.check_outputs()


def test_a_token_that_was_in_flight_at_a_preemption_is_delivered_and_does_not_count_as_gained_by_the_return() -> None:
    world = pressed(4, 4, blocks=4, max_tokens=12, max_steps_in_flight=2)
    while not victims(world):
        world.plan() or world.finish()
    victim = world.sequence(2)
    assert victim is not None
    assert victim.in_flight == 1
    had = len(world.tokens[2])
    world.finish()
    assert len(world.tokens[2]) == had + 1
    assert not victim.has_gained
    assert victim.in_flight == 0
    world.run()
    world.check_outputs()


def test_a_preempted_request_does_not_come_back_before_its_token_in_flight_has_arrived() -> None:
    world = pressed(4, 4, blocks=4, max_tokens=12, max_steps_in_flight=2)
    while not victims(world):
        world.plan() or world.finish()
    victim = world.sequence(2)
    assert victim is not None and victim.in_flight == 1
    world.abort(1)  # there is room for it now, but its log lacks a token that the device has drawn
    world.core.config = msgspec.structs.replace(world.core.config, max_steps_in_flight=9)
    assert world.core.plan(world.now) is None
    while world.in_flight:
        world.finish()
    step = world.step()
    assert step is not None
    assert set(world.rows(step)) == {2}
    world.run()
    world.check_outputs()


def test_the_asker_sits_out_for_one_that_was_just_brought_back_and_takes_its_blocks_after_its_token() -> None:
    world = pressed(4, 6, blocks=5)
    for _ in range(5):
        world.step()
    first, second = world.sequence(1), world.sequence(2)
    assert first is not None and second is not None
    assert first.num_computed == 8, "it asks for its third block in the next step"
    assert world.core.cache.num_available == 0
    second.has_gained = False
    step = world.step()
    assert step is not None
    assert set(world.rows(step)) == {2}
    assert not victims(world)
    step = world.step()
    assert step is not None
    assert set(world.rows(step)) == {1}
    assert victims(world) == [2]


def test_the_preempted_come_back_before_anyone_who_waits() -> None:
    world = pressed(4, 4, 4, blocks=6, max_tokens=10)
    while not victims(world):
        world.step()
    late = world.submit([7], max_tokens=1)
    while world.sequence(3) in world.core.queues.recovery:
        assert world.waiting() == [late], "a single block would do for it, but another was here before"
        world.step()
    world.run()
    world.check_outputs()


def test_nobody_joins_in_a_step_that_preempted_somebody() -> None:
    world = pressed(4, 4, 4, blocks=6)
    late = world.submit([7], max_tokens=1)
    while not victims(world):
        step = world.step()
    assert step is not None
    assert late not in world.rows(step)


def test_a_preempted_request_finds_its_own_full_blocks_again() -> None:
    world = pressed(4, 12, blocks=7, max_tokens=12)
    while not victims(world):
        world.step()
    world.abort(1)
    before = world.device.num_computed_tokens
    length = len(world.admits[2].token_ids) + len(world.tokens[2])
    step = world.step()
    assert step is not None
    start, count = world.rows(step)[2]
    assert start == (length - 1) // 4 * 4
    assert world.device.num_computed_tokens - before == count == length - start


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_resumption_of_a_single_token_is_planned_in_the_step_that_admits_it(in_flight: int) -> None:
    # All but its last token is cached in full blocks. Left for the next step, an idle engine would never plan one.
    world = pressed(4, 8, blocks=4, max_tokens=4, max_steps_in_flight=in_flight)
    while not victims(world):
        world.plan() or world.finish()
    while world.in_flight:
        world.finish()
    length = len(world.admits[2].token_ids) + len(world.tokens[2])
    assert length % 4 == 1
    world.abort(1)
    step = world.plan()
    assert step is not None
    assert world.rows(step) == {2: (length - 1, 1)}
    world.run()
    world.check_outputs()


def test_a_lone_request_grows_to_the_whole_pool_without_a_preemption() -> None:
    world = pressed(5, blocks=4, max_tokens=None)
    world.run()
    assert world.reason(1) == "length"
    assert len(world.tokens[1]) == 16 - 5
    assert not victims(world)
    world.check_outputs()


def test_two_that_share_every_block_make_room_one_by_one() -> None:
    # The victim's blocks are the asker's too: giving them up frees nothing, so it is not chosen, and steps back itself.
    world = World(blocks=3)
    world.without_reserve()
    for _ in range(2):
        world.submit([5] * 8, max_tokens=4, seed=1)
    world.run()
    world.check_outputs()
    world.check_nothing_is_left()


def test_a_preemption_raises_the_reserve_and_quiet_steps_lower_it() -> None:
    world = World(blocks=64)
    ratio = world.core.planner.reserve.ratio
    world.submit([1], max_tokens=50)
    for _ in range(20):
        world.step()
    assert world.core.planner.reserve.ratio < ratio
    world.core.planner.reserve.on_preemption()
    assert world.core.planner.reserve.ratio >= ratio
