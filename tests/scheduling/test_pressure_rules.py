"""Who gives way under memory pressure, and what the host keeps for whom."""

from __future__ import annotations

from repertory.actors.scheduling.reports import Preempted
from repertory.actors.scheduling.sequence import State
from repertory.protocol.messages import DeviceLost

from .test_tiers import PREFIX, leave_on_host, settle, tiers, turn, without_write_back
from .world import World


def tight(**settings: object) -> World:
    """A small pool, no reserve, nothing written back."""
    world = World(preemption_mode="swap", **settings)  # type: ignore[arg-type]
    world.without_reserve()
    without_write_back(world)
    return world


def victims(world: World) -> list[int]:
    return [report.request_id for report in world.reports if isinstance(report, Preempted)]


def test_the_fetch_of_an_aborted_request_gives_its_blocks_up_before_a_running_one_does() -> None:
    world = tight(blocks=20, host_blocks=40)
    prompt = PREFIX[:40]
    world.run(world.submit(prompt, max_tokens=1))
    world.core.cache.write_back(10)
    settle(world)
    world.core.cache.tree.evict(10)
    world._look()
    running = world.submit([5] * 20, max_tokens=40)
    turn(world)
    gone = world.submit([*prompt, 1], max_tokens=1)
    turn(world)
    assert world.core.stats().num_fetching == 1
    world.abort(gone)
    for _ in range(20):
        turn(world, "out")  # the lane in stands still
    world.run()
    world.check_outputs()
    assert running in world.ends
    assert victims(world) == []


def test_a_fetch_ahead_gives_its_blocks_up_before_a_running_request_does() -> None:
    world = World(blocks=24, host_blocks=60, preemption_mode="swap", max_num_seqs=1)
    without_write_back(world)
    world.core.policy.priority_class = lambda admit: admit.priority  # type: ignore[method-assign]
    world.core.planner.reserve.ratio = 0.1  # what it decays to when nothing has happened for a while
    low = world.submit([5] * 40, max_tokens=30, priority=1)
    for _ in range(4):
        turn(world, "out", "in")
    world.submit([6] * 70, max_tokens=8, priority=0)
    last = world.submit([7] * 30, max_tokens=40, priority=0)
    turns, was_fetched_ahead = 0, False
    while last not in world.ends:
        turns += 1
        assert turns < 300
        turn(world, "out", *(["in"] if turns % 100 == 99 else []))
        was_fetched_ahead |= bool(world.copies["in"]) and world.running() == [last]
    assert was_fetched_ahead
    assert victims(world) == [low]


def test_one_whose_reader_is_behind_keeps_nothing_on_the_host() -> None:
    world = tight(blocks=14, host_blocks=9, credit_window=1000)
    world.submit([5] * 20, max_tokens=24)
    victim = world.submit([6] * 20, max_tokens=24)
    while not world.copies["out"]:
        turn(world)
    seq = world.sequence(victim)
    assert seq is not None
    seq.credit_length = seq.length  # its reader is behind
    while not world.core.stats().num_paused:
        turn(world, "out")
    assert world.core.stats().host_blocks.referenced == 0
    others = [world.submit([token] * 20, max_tokens=24) for token in (8, 9)]
    world.run(*others)
    assert world.core.stats().num_preemptions["swap"] > 1
    assert world.core.stats().num_swap_fallbacks == 0


def test_one_that_is_only_held_for_others_is_not_swapped() -> None:
    world = tight(blocks=14, host_blocks=9)
    request = world.submit([5] * 20, max_tokens=24)
    world.submit([6] * 20, max_tokens=2, holds=True)
    while request not in world.ends:
        turn(world, "out", "in")
    stats = world.core.stats()
    assert (stats.num_preemptions, stats.swap_out_bytes) == ({"recompute": 1, "swap": 0}, 0)


def test_those_that_fetch_take_slots_from_those_that_may_wait() -> None:
    world = tiers(max_num_seqs=2, max_num_queued=1)
    leave_on_host(world)
    for last in range(2):
        world.submit([*PREFIX, last], max_tokens=1)
    turn(world)
    assert world.core.stats().num_fetching == 2
    for token in range(3, 6):
        world.submit([token] * 4, max_tokens=1)
    assert (len(world.waiting()), len(world.refusals)) == (1, 2)


def test_what_a_fetching_request_finds_is_counted_once_although_the_device_dies_meanwhile() -> None:
    world = tiers()
    leave_on_host(world)
    before = world.core.stats()
    request = world.submit([*PREFIX, 1], max_tokens=1)
    turn(world)
    seq = world.sequence(request)
    assert seq is not None
    assert seq.state is State.FETCHING
    world.core.on_device_lost(DeviceLost(world.core.epoch, "the test ends it"), world.now)
    assert world.core.stats().prefix_cache_queries == before.prefix_cache_queries
    assert seq.counts_hits


def test_what_is_moving_in_is_not_missing() -> None:
    world = tiers(max_num_seqs=8)
    leave_on_host(world)
    first = world.submit([*PREFIX, 1], max_tokens=1)
    turn(world)
    second = world.submit([*PREFIX, 2], max_tokens=1)
    seq = world.sequence(second)
    assert seq is not None
    free = world.core.cache.num_available
    assert world.core.cache.num_missing(seq.holding, seq.log) == 1 - free
    assert first != second


def test_a_choice_between_copying_and_computing_is_counted() -> None:
    world = tiers()
    leave_on_host(world)
    world.run(world.submit([*PREFIX, 1], max_tokens=1))
    assert world.core.stats().num_host_hits == {"fetch": 1, "recompute": 0}
