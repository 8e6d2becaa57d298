"""`priority`: strictly higher ones come first and preempt, equals never do, and the oldest is passed only so often."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repertory.actors.scheduling.ageing import LEAST_STALE, MOST_PASSED, Ageing
from repertory.actors.scheduling.policies.priority import AGED, Policy
from repertory.actors.scheduling.reports import Preempted
from repertory.protocol.ids import RequestId

from .lossy import LossyWorld
from .world import World


class RankedWorld(LossyWorld):
    """After every step, who was preempted is held against who came in."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(scheduling_policy="priority", **{"block_size": 4, **settings})

    def victims(self) -> list[RequestId]:
        return [report.request_id for report in self.reports if isinstance(report, Preempted)]

    def priority(self, request: RequestId) -> int:
        return self.admits[request].priority


def running_low(world: RankedWorld, count: int, *, priority: int = 5, max_tokens: int = 200) -> list[RequestId]:
    """Requests that run and have each gained a token."""
    requests = [world.submit([10 + number] * 4, priority=priority, max_tokens=max_tokens) for number in range(count)]
    while not all(len(world.tokens.get(request, [])) >= 2 for request in requests):
        world.step()
    return requests


def settle(world: World) -> None:
    while world.core.num_live:
        world.step()
    world.check_outputs()
    world.check_nothing_is_left()
    policy = world.core.policy
    assert isinstance(policy, Policy)
    assert not len(policy._ageing)


# ---- who comes first ------------------------------------------------------------------------------


def test_lower_numbers_come_first_and_equals_by_arrival() -> None:
    world = RankedWorld(max_num_seqs=1)
    numbers = [3, 0, 3, -7, 0, 2**31 - 1, -(2**31) + 1]
    requests = [world.submit([20 + place], priority=number, max_tokens=1) for place, number in enumerate(numbers)]
    settle(world)
    assert [requests.index(request) for request in world.ends] == [6, 3, 1, 4, 0, 2, 5]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_strictly_higher_one_starts_in_the_step_after_it_came(slots: int, in_flight: int) -> None:
    world = RankedWorld(max_num_seqs=slots, max_steps_in_flight=in_flight)
    low = running_low(world, slots)
    high = world.submit([90] * 4, priority=4, max_tokens=5)
    world.step()
    assert high in world.running() and world.victims() == low[-1:]
    settle(world)


@pytest.mark.parametrize("priority", [5, 6, 2**31 - 1])
def test_an_equal_or_lower_one_preempts_nobody(priority: int) -> None:
    world = RankedWorld(max_num_seqs=1)
    (low,) = running_low(world, 1, max_tokens=40)
    late = world.submit([90] * 4, priority=priority, max_tokens=5)
    settle(world)
    assert world.victims() == [] and list(world.ends) == [low, late]


def test_one_that_was_paused_takes_no_slot_from_its_equals() -> None:
    world = RankedWorld(max_num_seqs=1, credit_window=2)
    first = world.submit([10] * 4, max_tokens=9)
    while world.paused() != [first]:
        world.step()
    second = world.submit([20] * 4, max_tokens=60)
    world.grant(second, 100)
    world.step()
    world.step()
    world.grant(first, 100)
    while second not in world.ends:
        assert first not in world.running()
        world.step()
    assert world.victims() == []
    settle(world)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_victims_of_three_classes_come_back_in_their_order_whatever_the_host_holds_of_them(mode: str) -> None:
    # Room for one at a time on the device, for less than all on the host: a later class's blocks must not hold an
    # earlier one's return up.
    world = RankedWorld(max_num_seqs=1, blocks=12, host_blocks=6, preemption_mode=mode)
    world.without_reserve()
    requests = []
    for number, priority in enumerate((5, 4, 3, 2)):
        requests.append(world.submit([10 + number] * 13, priority=priority, max_tokens=12))
        for _ in range(4):
            world.step()
    assert world.victims() == requests[:3]
    settle(world)
    assert list(world.ends) == requests[::-1]


# ---- ageing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_unending_high_arrivals_pass_a_running_low_one_only_so_often(slots: int, in_flight: int) -> None:
    world = RankedWorld(max_num_seqs=slots, max_steps_in_flight=in_flight)
    low = running_low(world, 1)[0]
    highs: list[RequestId] = []
    while low not in world.ends:
        while len(world.waiting()) < 2 * slots:
            highs.append(world.submit([30 + len(highs) % 60] * 4, priority=0, max_tokens=3))
        world.step()
        assert len(highs) < 2000
    before = list(world.ends).index(low)
    assert world.victims().count(low) <= 1, "once it has aged nobody preempts it"
    # It is back after 16 have passed it, and then needs 200 steps, in which the other slots go on: at most 3 at a time.
    assert before <= MOST_PASSED + slots + (slots - 1) * 210
    settle(world)


def test_the_place_in_the_queue_bounds_the_wait() -> None:
    world = RankedWorld(max_num_seqs=1)
    lows = [world.submit([10 + number], priority=9, max_tokens=1) for number in range(4)]
    highs = [world.submit([30 + number % 60], priority=0, max_tokens=1) for number in range(100)]
    settle(world)
    order = list(world.ends)
    assert [order.index(low) for low in lows] == [(MOST_PASSED + 1) * (place + 1) - 1 for place in range(4)]
    assert [request for request in order if request in highs] == highs


def test_one_that_aged_and_lost_its_device_preempts_no_more_than_its_own_priority_allows() -> None:
    world = RankedWorld(max_num_seqs=2, credit_window=3)
    low = world.submit([10] * 4, priority=9, max_tokens=40)
    for number in range(MOST_PASSED + 3):
        world.grant(world.submit([30 + number] * 3, priority=0, max_tokens=2), 50)
    seq = world.sequence(low)
    assert seq is not None
    while world.paused() != [low]:
        world.step()
    assert seq.rank == (AGED, seq.seq_id) and seq.priority_class == 9
    while world.core.num_live > 1:
        world.step()
    middle = [world.submit([70 + number] * 4, priority=5, max_tokens=30) for number in range(2)]
    for request in middle:
        world.grant(request, 100)
    world.step()
    world.step()
    num_victims = len(world.victims())
    world.grant(low, 100)
    while not any(request in world.ends for request in middle):
        world.step()
    assert len(world.victims()) == num_victims, "it waited for a slot, ahead of everybody"
    settle(world)


def test_a_due_low_one_does_not_get_the_slot_that_was_freed_for_a_high_one() -> None:
    world = RankedWorld(max_num_seqs=2)
    policy = world.core.policy
    assert isinstance(policy, Policy)
    running = running_low(world, 2, priority=9, max_tokens=50)
    waiting = world.submit([60] * 4, priority=9, max_tokens=3)
    policy._ageing._num_passed = MOST_PASSED  # as if so many had passed it
    high = world.submit([61] * 4, priority=0, max_tokens=60)
    world.step()
    assert world.victims() == running[1:]
    assert world.running() == [high, running[0]] and waiting in world.waiting()
    settle(world)


def test_ageing_keeps_no_record_of_those_who_left() -> None:
    world = RankedWorld(max_num_seqs=1)
    world.submit([10], max_tokens=2000)
    world.step()
    oldest = world.submit([11], priority=3, max_tokens=1)
    for number in range(10 * LEAST_STALE):
        world.abort(world.submit([number % 90], priority=number % 7, max_tokens=1))
    policy = world.core.policy
    assert isinstance(policy, Policy)
    ageing: Ageing = policy._ageing
    assert len(ageing) == 1 and len(ageing._by_age) <= LEAST_STALE + 3
    world.abort(RequestId(1))
    world.run(oldest)
    settle(world)


# ---- anything at all ------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_nobody_is_preempted_for_its_equals_and_nobody_waits_beyond_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    world = RankedWorld(
        max_num_seqs=rng.choice([1, 2, 4]), max_steps_in_flight=rng.choice([1, 2]), max_num_batched_tokens=rng.choice([3, 64])
    )
    passed: dict[RequestId, int] = {}
    bound: dict[RequestId, int] = {}
    for number in range(120):
        if rng.random() < 0.7:
            priority, count = rng.choice([0, 0, 0, 1, 7]), rng.randint(1, 9)
            request = world.submit([number % 90] * count, priority=priority, max_tokens=rng.randint(1, 9))
            num_older = world.core.num_live - 1
            bound[request] = (num_older + 1) * (MOST_PASSED + world.config.running_limit)
        before = set(world.running())
        num_victims = len(world.victims())
        world.plan()
        came = [request for request in world.running() if request not in before]
        for victim in world.victims()[num_victims:]:
            assert any(world.priority(request) < world.priority(victim) for request in came)
        for request in queued(world):
            passed[request] = passed.get(request, 0) + sum(other > request for other in came)
            assert passed[request] <= bound[request]
        if world.in_flight and (len(world.in_flight) == world.config.max_steps_in_flight or rng.random() < 0.5):
            world.finish()
    settle(world)


def queued(world: RankedWorld) -> list[RequestId]:
    return [*world.waiting(), *world.preempted()]
