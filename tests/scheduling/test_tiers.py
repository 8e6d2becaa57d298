"""What the host keeps is not computed again, whatever happens on the way there and back."""

from __future__ import annotations

import pytest

from repertory.actors.scheduling.reports import HostHit
from repertory.protocol.ids import RequestId
from repertory.protocol.messages import RunStep

from .world import World

PREFIX = [(7 * i) % 900 + 1 for i in range(1024)]
OTHER = [(11 * i) % 800 + 2 for i in range(1100)]


def tiers(*, host_blocks: int = 128, **config: object) -> World:
    """80 device blocks of 16 tokens, one long prompt's and a few more. Nothing is written back but by the test."""
    defaults = {"blocks": 80, "block_size": 16, "preemption_mode": "swap", "max_num_batched_tokens": 2048}
    world = World(**{**defaults, "host_blocks": host_blocks, **config})  # type: ignore[arg-type]
    world.without_reserve()
    without_write_back(world)
    return world


def without_write_back(world: World) -> None:
    """The core copies nothing ahead of need."""
    world.core.pressure.write_back = lambda step_s, running: None  # type: ignore[method-assign]


def leave_on_host(world: World, prompt: list[int] = PREFIX, *, blocks: int = 64) -> None:
    """Serve `prompt`, copy up to `blocks` of it to the host, and have the device evict all of it."""
    world.run(world.submit(prompt, max_tokens=1))
    world.core.cache.write_back(blocks)
    settle(world)
    world.core.cache.tree.evict(len(prompt) // 16)
    world._look()
    assert world.core.stats().device_blocks.cached == 0


def settle(world: World) -> None:
    """Send what the test had copied, and run all copies."""
    send(world)
    while world.copy():
        pass


def send(world: World) -> None:
    """Send what the test had copied behind the core's back."""
    for copy in world.core.pressure.take_copies(world.core.epoch):
        world.copies[copy.direction].append(copy)


def turn(world: World, *lanes: str) -> RunStep | None:
    """Plan one step, run it where its fences allow, and copy on the named lanes only."""
    step = world.plan()
    if world.in_flight and not world._unmet(world.in_flight[0]):
        world.finish()
    for lane in lanes:
        while world.copy(lane):  # type: ignore[arg-type]
            pass
    return step


def computed_by(world: World, prompt: list[int], **submit: object) -> int:
    """Tokens that are computed for a request of one token."""
    before = world.device.num_computed_tokens
    world.run(world.submit(prompt, max_tokens=1, **submit))  # type: ignore[arg-type]
    return world.device.num_computed_tokens - before


def finish(world: World) -> None:
    world.run()
    world.check_outputs()
    world.check_nothing_is_left()


# ---- hits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("blocks", [64, 40, 1, 0])
def test_a_prefix_that_left_the_device_costs_only_what_the_host_does_not_hold(blocks: int, in_flight: int) -> None:
    world = tiers(max_steps_in_flight=in_flight)
    leave_on_host(world, blocks=blocks or 1)
    if not blocks:
        world.reset()
    assert computed_by(world, [*PREFIX, 1, 2, 3]) == 1024 - 16 * blocks + 3
    assert world.core.stats().prefix_cache_hits == 16 * blocks
    finish(world)


def test_a_prefix_on_both_tiers_is_read_where_it_is_and_fetched_where_it_is_not() -> None:
    world = tiers()
    world.run(world.submit(PREFIX, max_tokens=1))
    world.core.cache.write_back(60)
    settle(world)
    world.core.cache.tree.evict(34)  # 30 on both, 30 on the host, 4 on neither
    assert computed_by(world, [*PREFIX, 1]) == 4 * 16 + 1
    assert [len(copy.sources) for copy in world.copied if copy.direction == "in"] == [30]
    finish(world)


def test_what_the_host_had_to_evict_is_computed() -> None:
    world = tiers(host_blocks=64)
    leave_on_host(world)
    world.run(world.submit(OTHER, max_tokens=1))
    world.core.cache.write_back(20)  # displaces the tail of the other
    settle(world)
    world.core.cache.tree.evict(68)
    assert computed_by(world, [*PREFIX, 1]) == 20 * 16 + 1
    finish(world)


def test_where_it_is_cheaper_the_host_is_not_asked() -> None:
    world = tiers(preemption_mode="auto")
    world.core.pressure.cost.block_bytes = 10**9  # minutes of copying
    leave_on_host(world)
    assert computed_by(world, [*PREFIX, 1]) == 1025
    assert [report.fetched for report in world.reports if isinstance(report, HostHit)] == [False]
    assert not any(copy.direction == "in" for copy in world.copied)
    finish(world)


def test_two_that_want_the_same_prefix_are_brought_it_by_one_copy() -> None:
    world = tiers()
    leave_on_host(world)
    before = world.device.num_computed_tokens
    for last in (1, 2):
        world.submit([*PREFIX, last], max_tokens=1)
    turn(world)
    assert world.core.stats().num_fetching == 2
    assert sum(len(copy.sources) for copy in world.copies["in"]) == 64
    world.run()
    assert world.device.num_computed_tokens - before == 2
    finish(world)


def test_one_that_wants_a_prefix_on_its_way_out_waits_for_nothing_while_it_is_on_the_device() -> None:
    world = tiers()
    world.run(world.submit(PREFIX, max_tokens=1))
    world.core.cache.write_back(64)
    send(world)
    assert world.copies["out"]
    assert computed_by(world, [*PREFIX, 1]) == 1
    finish(world)


def test_one_that_wants_a_prefix_that_left_the_device_and_has_not_arrived_computes_it() -> None:
    world = tiers()
    world.run(world.submit(PREFIX, max_tokens=1))
    world.core.cache.write_back(64)
    send(world)
    world.core.cache.tree.evict(64)
    request = world.submit([*PREFIX, 1], max_tokens=1)
    before = world.device.num_computed_tokens
    while request not in world.ends:
        step = world.plan()
        assert step is not None or world.in_flight
        world.finish()
    assert world.device.num_computed_tokens - before == 1025
    finish(world)


# ---- copies that fail, and lanes that stand still ---------------------------------------------------


@pytest.mark.parametrize("num_waiting", [1, 3])
def test_a_copy_in_that_fails_costs_a_computation_and_no_request(num_waiting: int) -> None:
    world = tiers(max_steps_in_flight=2)
    leave_on_host(world)
    world.failing_copies = lambda copy: copy.direction == "in"
    before = world.device.num_computed_tokens
    for last in range(num_waiting):
        world.submit([*PREFIX, last], max_tokens=2)
    world.run()
    assert world.core.stats().num_failed_copies == 1
    assert world.device.num_computed_tokens - before == 1024 + 2 * num_waiting
    assert world.core.stats().prefix_cache_hits == 1024 * (num_waiting - 1)
    finish(world)


def test_a_copy_out_that_fails_leaves_a_preempted_request_to_be_computed() -> None:
    world, victim = swapped_pair()
    world.failing_copies = lambda copy: True
    while world.copy():
        pass
    world.failing_copies = lambda copy: False
    assert world.core.stats().num_failed_copies
    assert victim in world.preempted()
    finish(world)


def swapped_pair(**config: object) -> tuple[World, RequestId]:
    """Two requests of which the second has just been swapped out; its copy has not run."""
    world = World(blocks=14, host_blocks=40, preemption_mode="swap", max_steps_in_flight=1, **config)  # type: ignore[arg-type]
    world.without_reserve()
    without_write_back(world)
    world.submit([5] * 20, max_tokens=24)
    victim = world.submit([6] * 20, max_tokens=24)
    while True:
        world.plan()
        if world.copies["out"]:
            break
        world.finish()
    assert world.preempted() == [victim]
    assert world.copies["out"]
    return world, victim


@pytest.mark.parametrize("lane", ["in", "out"])
def test_while_a_lane_stands_still_others_run_and_when_it_moves_again_all_goes_on(lane: str) -> None:
    world = tiers(max_num_seqs=8)
    leave_on_host(world)
    fetching = world.submit([*PREFIX, 1], max_tokens=4)
    turn(world)
    assert world.core.stats().num_fetching == 1
    others = [world.submit([last] * 8, max_tokens=6) for last in (3, 4)]
    for _ in range(12):
        turn(world, *({"in", "out"} - {lane}))
    assert all(other in world.ends for other in others)
    assert (fetching in world.ends) == (lane == "out")
    finish(world)


def test_a_swapped_request_whose_copy_out_stands_still_is_computed_meanwhile() -> None:
    world, victim = swapped_pair()
    for _ in range(200):
        if victim in world.ends:
            break
        step = world.plan()
        # Where a step itself waits for the lane there is nothing else to do.
        if world.in_flight:
            world.finish()
        assert step is not None or not world.in_flight
    finish(world)


def test_fetching_sequences_hold_slots_and_give_them_back() -> None:
    world = tiers(max_num_seqs=1)
    leave_on_host(world)
    world.submit([*PREFIX, 1], max_tokens=2)
    late = world.submit([9], max_tokens=1)
    for _ in range(5):
        turn(world)
    assert world.waiting() == [late]
    finish(world)


# ---- preemption -------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_blocks", [0, 2, 12, 200])
@pytest.mark.parametrize("mode", ["auto", "swap", "heuristic", "recompute"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_requests_that_fit_only_one_at_a_time_all_finish(mode: str, host_blocks: int, in_flight: int) -> None:
    world = World(blocks=10, host_blocks=host_blocks, preemption_mode=mode, max_steps_in_flight=in_flight)
    world.without_reserve()
    for number in range(6):
        world.submit([100 + number] * (5 + number), max_tokens=24, seed=number if number % 2 else None)
    world.run()
    stats = world.core.stats()
    assert 0 < sum(stats.num_preemptions.values()) <= 6 * 9
    if mode == "swap":
        assert stats.num_swap_fallbacks == stats.num_preemptions["recompute"]
        assert host_blocks < 12 or stats.num_preemptions["swap"]
        assert (stats.num_swap_fallbacks > 0) == (host_blocks <= 2)
    if mode == "recompute":
        assert stats.num_preemptions["swap"] == stats.num_swap_fallbacks == 0
    finish(world)


def test_a_swapped_request_comes_back_without_computing_its_full_blocks() -> None:
    world, victim = swapped_pair()
    while world.copy():
        pass
    world.abort(RequestId(1))
    while world.in_flight:
        world.finish()
    length = len(world.sequence(victim).log)  # type: ignore[union-attr]
    before = world.device.num_computed_tokens
    while (step := world.step()) is None or not step.seq_ids:
        pass
    assert world.rows(step)[victim] == ((length - 1) // 4 * 4, length - (length - 1) // 4 * 4)
    assert world.device.num_computed_tokens - before == length - (length - 1) // 4 * 4
    finish(world)


@pytest.mark.parametrize("blocks", [26, 40, 64])
def test_pools_below_the_running_set_take_turns_and_give_the_same(blocks: int) -> None:
    world = World(blocks=blocks, host_blocks=blocks, preemption_mode="swap", max_steps_in_flight=2)
    world.without_reserve()
    for number in range(12):
        world.submit([number + 1] * 8 + [number] * (number * 3), max_tokens=40)
    world.run()
    stats = world.core.stats()
    assert stats.num_preemptions["swap"]
    assert stats.swap_out_bytes and stats.swap_in_bytes
    finish(world)


def test_an_abort_of_one_that_is_fetching_leaves_its_prefix_to_the_next() -> None:
    world = tiers()
    leave_on_host(world)
    request = world.submit([*PREFIX, 1], max_tokens=1)
    turn(world)
    assert world.core.stats().num_fetching == 1
    world.abort(request)
    assert world.core.stats().num_fetching == 0
    assert computed_by(world, [*PREFIX, 2]) == 1
    assert sum(copy.direction == "in" for copy in world.copied) == 1
    finish(world)


def test_a_higher_class_comes_in_past_one_that_is_fetching() -> None:
    world = tiers(max_num_seqs=8)
    world.core.policy.priority_class = lambda admit: admit.priority  # type: ignore[method-assign]
    leave_on_host(world)
    low = world.submit([*PREFIX, 1], max_tokens=4, priority=1)
    turn(world)
    assert world.core.stats().num_fetching == 1
    high = world.submit([3] * 20, max_tokens=4, priority=0)
    while high not in world.ends:
        turn(world)
    assert low not in world.ends
    finish(world)


def test_classes_preempt_by_swap_and_all_give_what_they_give_alone() -> None:
    world = World(blocks=12, host_blocks=30, preemption_mode="swap", max_steps_in_flight=2, max_num_seqs=3)
    world.core.policy.priority_class = lambda admit: admit.priority  # type: ignore[method-assign]
    world.without_reserve()
    for number in range(9):
        world.submit([number + 1] * (6 + number), max_tokens=16, priority=2 - number // 3)
        for _ in range(3):
            turn(world, "out") if number % 2 else turn(world, "in", "out")
    world.run()
    assert world.core.stats().num_preemptions["swap"]
    finish(world)


def test_a_reset_forgets_both_tiers_and_what_is_preempted_keeps_its_own() -> None:
    world, victim = swapped_pair()
    while world.copy():
        pass
    pinned = world.core.stats().host_blocks.referenced
    assert pinned
    world.reset()
    assert world.core.stats().host_blocks.referenced == pinned
    assert world.core.stats().host_blocks.cached == 0
    assert victim in world.preempted()
    finish(world)
