"""A higher class takes the slots and blocks of lower ones, but only when that lets it in, and never those of its own."""

from __future__ import annotations

from typing import Any

import pytest

from repertory.actors.scheduling.reports import Preempted
from repertory.protocol.ids import RequestId
from repertory.protocol.messages import Admit

from .lossy import MOST_TURNS, LossyWorld, run_to_the_end, turn, until

LOW, HIGH = 1, 0


class TwoClasses:
    """Class = the request's priority: lower numbers first."""

    def priority_class(self, admit: Admit) -> int:
        return admit.priority

    def admits_beside(self, num_running: int) -> bool:
        return True


def world_of_classes(*, reserve: bool = False, **settings: Any) -> LossyWorld:
    """A world with that policy, and without a reserve unless it is asked for."""
    world = LossyWorld(**settings)
    world.core.policy = world.core.gate.policy = TwoClasses()
    if not reserve:
        world.without_reserve()
    return world


def victims(world: LossyWorld) -> list[RequestId]:
    return [report.request_id for report in world.reports if isinstance(report, Preempted)]


def running_low(world: LossyWorld, count: int, length: int = 4, **submit: Any) -> list[RequestId]:
    """Low requests that run and have each gained a token."""
    requests = [world.submit([10 + number] * length, priority=LOW, **{"max_tokens": 30, **submit}) for number in range(count)]
    until(world, lambda: all(len(world.tokens.get(request, [])) >= 2 for request in requests))
    while world.in_flight:
        world.finish()
    return requests


# ---- slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("slots", [1, 2])
def test_at_the_running_limit_the_last_low_one_gives_its_slot_in_the_same_step(slots: int, in_flight: int) -> None:
    world = world_of_classes(max_num_seqs=slots, max_steps_in_flight=in_flight)
    low = running_low(world, slots)
    high = world.submit([90] * 4, priority=HIGH, max_tokens=5)
    step = world.plan()
    assert step is not None
    assert high in world.rows(step)
    assert victims(world) == [low[-1]]
    assert world.running() == [high, *low[:-1]]
    run_to_the_end(world)
    assert len(victims(world)) == 1


def test_its_own_class_is_not_preempted() -> None:
    world = world_of_classes(max_num_seqs=1)
    first = world.submit([1] * 4, priority=HIGH, max_tokens=9)
    turn(world)
    second = world.submit([2] * 4, priority=HIGH, max_tokens=3)
    low = world.submit([3] * 4, priority=LOW, max_tokens=3)
    until(world, lambda: first in world.ends)
    assert victims(world) == []
    assert second not in world.tokens and low not in world.tokens
    run_to_the_end(world)


def test_a_low_request_never_preempts_a_high_one() -> None:
    world = world_of_classes(max_num_seqs=1)
    high = world.submit([1] * 4, priority=HIGH, max_tokens=9)
    turn(world)
    low = world.submit([2] * 4, priority=LOW, max_tokens=2)
    run_to_the_end(world)
    assert victims(world) == []
    assert list(world.ends) == [high, low]


def test_a_slot_that_is_about_to_be_free_is_waited_for_and_nobody_preempted() -> None:
    world = world_of_classes(max_num_seqs=2, max_steps_in_flight=2)
    low = running_low(world, 1, max_tokens=30)
    ending = world.submit([80] * 4, priority=LOW, max_tokens=1)
    step = world.plan()
    assert step is not None and ending in world.rows(step)  # its only token is in flight: its slot is free
    high = world.submit([90] * 4, priority=HIGH, max_tokens=2)
    step = world.plan()
    assert step is not None and set(world.rows(step)) == {*low, high}
    assert victims(world) == []
    run_to_the_end(world)


# ---- blocks ---------------------------------------------------------------------------------------


def test_blocks_are_taken_from_the_end_of_the_order_and_no_more_than_are_needed() -> None:
    world = world_of_classes(blocks=9)
    low = running_low(world, 3)  # two blocks each, three free
    high = world.submit([90] * 17, priority=HIGH, max_tokens=2)  # five
    step = world.plan()
    assert step is not None and high in world.rows(step)
    assert victims(world) == [low[2]]
    run_to_the_end(world)


def test_several_give_way_where_one_is_not_enough() -> None:
    world = world_of_classes(blocks=9)
    low = running_low(world, 3)
    high = world.submit([90] * 27, priority=HIGH, max_tokens=2)  # seven blocks
    step = world.plan()
    assert step is not None and high in world.rows(step)
    assert victims(world) == [low[2], low[1]]
    run_to_the_end(world)


def test_nobody_gives_way_for_one_that_would_not_fit_even_then() -> None:
    world = world_of_classes(blocks=9)
    high = world.submit([80] * 13, priority=HIGH, max_tokens=30)  # four blocks and more
    low = running_low(world, 1)
    late = world.submit([90] * 28, priority=HIGH, max_tokens=2)  # seven: not beside the other high one
    for _ in range(3):
        turn(world)
        assert victims(world) == []
        assert world.waiting() == [late]
        assert world.running() == [high, *low]
    run_to_the_end(world)


def test_the_reserve_for_growth_is_part_of_what_is_enough() -> None:
    world = world_of_classes(blocks=10, reserve=True, max_num_seqs=4)
    high = world.submit([80] * 4, priority=HIGH, max_tokens=20)
    low = running_low(world, 1, max_tokens=6)
    late = world.submit([90] * 25, priority=HIGH, max_tokens=2)
    for _ in range(MOST_TURNS):
        before = len(victims(world))
        step = world.plan()
        if len(victims(world)) > before:
            assert step is not None and late in world.rows(step), "preempted for one that did not come in"
        if world.in_flight:
            world.finish()
        if not world.core.num_live:
            break
    assert {world.reason(request) for request in (high, late, *low)} == {"length"}
    world.check_outputs()


def test_a_preemption_for_a_class_does_not_raise_the_reserve() -> None:
    world = world_of_classes(max_num_seqs=1, reserve=True)
    running_low(world, 1)
    before = world.core.planner.reserve.ratio
    world.submit([90] * 4, priority=HIGH, max_tokens=2)
    world.plan()
    assert len(victims(world)) == 1
    assert world.core.planner.reserve.ratio <= before
    run_to_the_end(world)


# ---- who may be taken -----------------------------------------------------------------------------


def test_one_that_has_gained_nothing_since_it_came_back_is_passed_over() -> None:
    world = world_of_classes(max_num_seqs=2, max_num_batched_tokens=3)
    first, second = running_low(world, 2, length=9)
    for number in range(2):
        high = world.submit([80 + number] * 3, priority=HIGH, max_tokens=1)
        until(world, lambda request=high: request in world.ends)  # type: ignore[misc]
    assert victims(world)[0] == second
    until(world, lambda: second in world.running())
    assert not world.sequence(second).has_gained  # type: ignore[union-attr]
    while world.in_flight:
        world.finish()
    num_before = len(victims(world))
    world.submit([95] * 3, priority=HIGH, max_tokens=1)
    world.plan()
    assert victims(world)[num_before:] in ([first], [])
    assert second not in victims(world)[num_before:]
    run_to_the_end(world)


def test_a_high_one_whose_token_is_in_flight_preempts_nobody_before_it_has_arrived() -> None:
    world = world_of_classes(max_num_seqs=1, max_steps_in_flight=2)
    high = world.submit([80] * 4, priority=HIGH, max_tokens=9)
    turn(world)
    seq = world.sequence(high)
    assert seq is not None
    while seq.in_flight == 0:
        world.plan()
    world.core.planner.set_back(seq)  # as a preemption would
    world.core._leave_device(seq)
    low = world.submit([10] * 4, priority=LOW, max_tokens=9)
    assert world.core.queues.candidate() is seq
    while world.in_flight:
        assert low not in world.tokens
        world.finish()
    run_to_the_end(world)


def test_a_high_one_without_credit_preempts_nobody() -> None:
    world = world_of_classes(max_num_seqs=1)
    high = world.submit([80] * 4, priority=HIGH, max_tokens=9)
    turn(world)
    turn(world)
    seq = world.sequence(high)
    assert seq is not None
    world.core.planner.set_back(seq)
    world.core._leave_device(seq)
    seq.credit_length = len(seq.log)
    low = world.submit([10] * 4, priority=LOW, max_tokens=9)
    turn(world)
    assert world.paused() == [high]
    assert world.running() == [low]
    turn(world)
    assert victims(world) == []
    world.grant(high, 99)
    step = world.plan()
    assert step is not None and set(world.rows(step)) == {high}
    assert victims(world) == [low]
    run_to_the_end(world)


def test_a_high_one_that_is_still_being_gathered_preempts_nobody() -> None:
    world = world_of_classes(max_num_seqs=2, scheduling_delay_s=1.0)
    world.now = 5.0
    low = [world.submit([10 + number] * 4, priority=LOW, max_tokens=20) for number in range(2)]
    until(world, lambda: all(len(world.tokens.get(request, [])) >= 2 for request in low))
    high = world.submit([90] * 4, priority=HIGH, max_tokens=2)
    arrived = world.now
    while victims(world) == []:
        turn(world)
        assert world.running() == low or world.now >= arrived
        if world.core.queues.waiting and world.now < arrived + 1.0 and not world.in_flight:
            world.now = arrived + 1.0
    assert high in world.running() or high in world.ends
    run_to_the_end(world)


def test_a_suspect_that_runs_alone_is_not_preempted_in_the_middle() -> None:
    world = world_of_classes(max_num_seqs=1, max_num_batched_tokens=2)
    low = world.submit([10] * 9, priority=LOW, max_tokens=3)
    for _ in range(2):
        world.plan()
        world.relive()
    world.plan()
    assert world.suspects() == [low]
    world.submit([90] * 4, priority=HIGH, max_tokens=2)
    while world.suspects():
        turn(world)
        assert victims(world) == []
    run_to_the_end(world)


# ---- the line -------------------------------------------------------------------------------------


def test_a_high_one_that_waits_for_room_holds_up_those_below_it() -> None:
    world = world_of_classes(blocks=8)
    first = world.submit([80] * 13, priority=HIGH, max_tokens=12)
    turn(world)
    second = world.submit([90] * 20, priority=HIGH, max_tokens=2)  # does not fit beside the first
    low = world.submit([10] * 4, priority=LOW, max_tokens=2)  # would
    turn(world)
    assert world.waiting() == [second, low]
    run_to_the_end(world)
    assert list(world.ends) == [first, second, low]


def test_a_waiting_high_one_comes_before_a_preempted_low_one_and_a_preempted_one_before_a_waiting_one_of_its_class() -> None:
    world = world_of_classes(max_num_seqs=1)
    (low,) = running_low(world, 1)
    first = world.submit([80] * 4, priority=HIGH, max_tokens=6)
    turn(world)
    assert world.preempted() == [low]
    late_low = world.submit([11] * 4, priority=LOW, max_tokens=2)
    second = world.submit([90] * 4, priority=HIGH, max_tokens=2)
    run_to_the_end(world)
    assert list(world.ends) == [first, second, low, late_low]


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("blocks", [8, 12, 40])
@pytest.mark.parametrize("reserve", [True, False])
def test_many_of_three_classes_all_end_as_they_would_alone(blocks: int, reserve: bool, in_flight: int) -> None:
    world = world_of_classes(
        blocks=blocks, reserve=reserve, max_num_seqs=3, max_num_batched_tokens=7, max_steps_in_flight=in_flight
    )
    for number in range(24):
        stem = [number % 3] * (number % 9)
        world.submit([*stem, 20 + number, 30], priority=number * 7 % 3, max_tokens=2 + number % 9, seed=number)
        turn(world)
    run_to_the_end(world)
