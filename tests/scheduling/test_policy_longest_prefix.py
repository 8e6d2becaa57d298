"""`longest-prefix`: the order it keeps up equals a lookup for all; twins wait for what another computes; none for ever."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repertory.actors.scheduling import waiting_prefixes
from repertory.actors.scheduling.ageing import MOST_PASSED
from repertory.actors.scheduling.policies.longest_prefix import Policy
from repertory.actors.scheduling.sequence import Sequence, State
from repertory.radix.tokens import TokenLog

from .lossy import LossyWorld
from .world import World

BLOCK = 4


@pytest.fixture(autouse=True)
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that changes is taken in at once, so that what is kept up is exact. One test has a limit."""
    monkeypatch.setattr(waiting_prefixes, "MOST_PLACED", 10**9)


class WatchedWorld(LossyWorld):
    """After every operation what the policy has kept up is held against lookups for all who wait."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(scheduling_policy="longest-prefix", **settings)

    def _look(self) -> None:
        super()._look()
        prefixes = policy_of(self).prefixes
        places = {seq.seq_id: cached_blocks(self, seq) for seq in self.core.queues.waiting}
        free = [seq for seq in self.core.queues.waiting if not has_a_leader(self, seq, places[seq.seq_id])]
        expected = min(free, key=lambda seq: (-places[seq.seq_id], seq.seq_id), default=None)
        assert prefixes.longest() is expected


def policy_of(world: World) -> Policy:
    policy = world.core.policy
    assert isinstance(policy, Policy)
    return policy


def cached_blocks(world: World, seq: Sequence) -> int:
    """Whole blocks the tree holds of a prompt but its last token, on either tier, found by walking it."""
    node = world.core.cache.tree.peek(seq.holding.namespace)
    size, depth, limit = world.config.block_size, 0, (len(seq.log) - 1) // world.config.block_size
    while node is not None:
        run = [bytes(node.tokens[i : i + 4 * size]) for i in range(0, len(node.tokens), 4 * size)]
        for block in run:
            if depth == limit or block != seq.log.block(depth, size):
                return depth
            depth += 1
        children = [child for bucket in node.children.values() for child in bucket]
        node = next((c for c in children if depth < limit and c.tokens.startswith(seq.log.block(depth, size))), None)
    return depth


def shared_blocks(world: World, left: TokenLog, right: TokenLog) -> int:
    size, count = world.config.block_size, 0
    for index in range(min(len(left) - 1, len(right)) // size):
        if left.block(index, size) != right.block(index, size):
            break
        count += 1
    return count


def has_a_leader(world: World, seq: Sequence, cached: int) -> bool:
    """Whether one that runs is about to compute more of this prompt than is cached."""
    queues = world.core.queues
    computing = [other for other in (*queues.running, *queues.fetching.values()) if other.is_prefilling]
    same = [other for other in computing if other.holding.namespace == seq.holding.namespace]
    return any(shared_blocks(world, seq.log, other.log) > cached for other in same)


def nothing_is_left(world: World) -> None:
    """The policy remembers nobody, and no node of the tree."""
    prefixes = policy_of(world).prefixes
    prefixes.longest()
    assert not prefixes._waiting and not prefixes._computing and not prefixes._places and not prefixes._unplaced
    assert not len(policy_of(world)._ageing)


# ---- the order ------------------------------------------------------------------------------------


def test_more_cached_tokens_come_first_and_equals_by_arrival() -> None:
    world = WatchedWorld(max_num_seqs=1, block_size=BLOCK)
    stem = list(range(1, 13))
    world.submit(stem, max_tokens=1)
    world.run()
    busy = world.submit([900], max_tokens=5)
    world.plan()
    none = world.submit([800] * 14, max_tokens=1)
    short = world.submit([*stem[:4], 700, 701, 702, 703, 704], max_tokens=1)
    long = world.submit([*stem, 600], max_tokens=1)
    late = world.submit([*stem, 500], max_tokens=1)
    world.run()
    assert list(world.ends)[1:] == [busy, long, late, short, none]
    nothing_is_left(world)


def test_the_last_token_of_a_prompt_is_computed_so_a_block_that_ends_with_it_does_not_count() -> None:
    world = WatchedWorld(max_num_seqs=1, block_size=BLOCK)
    stem = list(range(1, 9))
    world.submit(stem, max_tokens=1)
    world.run()
    busy = world.submit([900], max_tokens=5)
    world.plan()
    whole = world.submit(stem, max_tokens=1)  # a block of the two counts
    more = world.submit([*stem, 9], max_tokens=1)
    world.run()
    assert list(world.ends)[1:] == [busy, more, whole]


def test_namespaces_do_not_mix() -> None:
    world = WatchedWorld(max_num_seqs=1, block_size=BLOCK)
    stem = list(range(1, 13))
    world.submit(stem, max_tokens=1, cache_salt="a")
    world.run()
    busy = world.submit([900], max_tokens=5)
    world.plan()
    other = world.submit([*stem, 20], max_tokens=1, cache_salt="b")
    plain = world.submit([*stem, 21], max_tokens=1)
    same = world.submit([*stem, 22], max_tokens=1, cache_salt="a")
    world.run()
    assert list(world.ends)[1:] == [busy, same, other, plain]
    nothing_is_left(world)


def test_a_prefix_that_is_evicted_while_its_request_waits_counts_no_more() -> None:
    world = WatchedWorld(max_num_seqs=1, block_size=BLOCK, blocks=16)
    stem = list(range(1, 25))
    world.submit(stem, max_tokens=1)
    world.run()
    busy = world.submit(list(range(100, 128)), max_tokens=34)  # takes all but one of the blocks
    world.plan()
    cached = world.submit([*stem, 30], max_tokens=1)
    waiting = world.submit([50] * 9, max_tokens=1)
    sequence = world.sequence(cached)
    assert sequence is not None and cached_blocks(world, sequence) == 6
    while busy not in world.ends:
        world.step()
    world.run()
    assert list(world.ends)[1:] in ([busy, cached, waiting], [busy, waiting, cached])
    nothing_is_left(world)


def test_a_reset_of_the_cache_puts_everybody_back_to_arrival() -> None:
    world = WatchedWorld(max_num_seqs=1, block_size=BLOCK)
    stem = list(range(1, 13))
    world.submit(stem, max_tokens=1)
    world.run()
    busy = world.submit([900], max_tokens=5)
    world.plan()
    first = world.submit([800] * 9, max_tokens=1)
    cached = world.submit([*stem, 30], max_tokens=1)
    world.reset()
    world.run()
    assert list(world.ends)[1:] == [busy, first, cached]


def test_what_a_device_held_is_forgotten_when_it_dies() -> None:
    world = WatchedWorld(max_num_seqs=1, block_size=BLOCK)
    stem = list(range(1, 13))
    world.submit(stem, max_tokens=1)
    while world.core.num_live:
        world.step()
    busy = world.submit([900], max_tokens=5)
    world.plan()
    first = world.submit([800] * 9, max_tokens=1)
    cached = world.submit([*stem, 30], max_tokens=1)
    assert policy_of(world).prefixes.longest() is world.sequence(cached)
    world.relive()
    assert policy_of(world).prefixes.longest() is world.sequence(first)
    while world.core.num_live:
        world.step()
    assert list(world.ends)[1:] == [busy, first, cached]
    nothing_is_left(world)


@pytest.mark.parametrize("limit", [1, 2])
def test_without_a_prefix_cache_the_order_is_that_of_arrival(limit: int) -> None:
    world = WatchedWorld(max_num_seqs=limit, block_size=BLOCK, enable_prefix_caching=False)
    requests = [world.submit([7] * 9, max_tokens=2) for _ in range(6)]
    world.run()
    assert list(world.ends) == requests


# ---- twins ----------------------------------------------------------------------------------------


def test_a_twin_is_deferred_until_the_first_has_computed_what_they_share() -> None:
    world = WatchedWorld(max_num_seqs=8, block_size=BLOCK, max_num_batched_tokens=9)
    stem = list(range(1, 25))
    first = world.submit([*stem, 30], max_tokens=4)
    twin = world.submit([*stem, 31], max_tokens=4)
    other = world.submit([60] * 6, max_tokens=4)
    world.step()
    assert world.running() == [first, other] and world.waiting() == [twin]
    sequence = world.sequence(first)
    assert sequence is not None
    while twin in world.waiting():
        is_needed = sequence.num_computed < len(stem)
        world.step()
        assert (twin in world.waiting()) == is_needed
    world.run()
    assert world.device.num_computed_tokens == len(stem) + 2 + 6 + 3 * 3, "each token of the stem was computed once"
    assert world.opens[twin].num_cached_tokens == len(stem)
    nothing_is_left(world)


def test_a_twin_whose_way_parts_early_waits_only_so_far() -> None:
    world = WatchedWorld(max_num_seqs=8, block_size=BLOCK, max_num_batched_tokens=4)
    first = world.submit([*range(1, 9), *[50] * 60], max_tokens=1)
    twin = world.submit([*range(1, 9), 70], max_tokens=1)
    for _ in range(4):
        world.step()
    assert twin in world.running() or twin in world.ends
    sequence = world.sequence(first)
    assert sequence is not None and sequence.is_prefilling, "it does not wait for the rest of the other's prompt"
    world.run()


def test_twins_of_one_that_is_aborted_go_on_without_it() -> None:
    world = WatchedWorld(max_num_seqs=8, block_size=BLOCK, max_num_batched_tokens=4)
    stem = [40 + number for number in range(40)]
    first = world.submit([*stem, 1], max_tokens=1)
    twins = [world.submit([*stem, 2 + number], max_tokens=1) for number in range(3)]
    world.step()
    assert world.waiting() == twins
    world.abort(first)
    world.step()
    assert world.running() == twins[:1] and world.waiting() == twins[1:]
    world.run(*twins)
    world.check_outputs()
    nothing_is_left(world)


def test_an_aborted_twin_leaves_nothing_behind() -> None:
    world = WatchedWorld(max_num_seqs=8, block_size=BLOCK, max_num_batched_tokens=4)
    stem = [40 + number for number in range(20)]
    world.submit([*stem, 1], max_tokens=1)
    twin = world.submit([*stem, 2], max_tokens=1)
    alone = world.submit([*stem[:7], 3, 4, 5], max_tokens=1)
    world.step()
    world.abort(twin)
    world.abort(alone)
    world.run()
    nothing_is_left(world)


def test_a_prompt_within_another_is_its_twin_too() -> None:
    world = WatchedWorld(max_num_seqs=8, block_size=BLOCK, max_num_batched_tokens=4)
    stem = [40 + number for number in range(16)]
    for longer, shorter in (([*stem, 1, 2, 3, 4, 5], stem), (stem, [*stem, 1, 2, 3, 4, 5])):
        world.reset()
        first = world.submit(longer, max_tokens=1)
        twin = world.submit(shorter, max_tokens=1)
        world.step()
        assert world.running() == [first] and world.waiting() == [twin]
        world.run()


def test_of_many_twins_a_step_takes_in_a_few_and_nobody_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_prefixes, "MOST_PLACED", 3)
    world = World(scheduling_policy="longest-prefix", max_num_seqs=2, block_size=BLOCK, blocks=2000, max_num_batched_tokens=16)
    stem = [40 + number for number in range(60)]
    requests = [world.submit([*stem, 1 + number], max_tokens=2) for number in range(60)]
    other = world.submit([900] * 9, max_tokens=2)
    prefixes = policy_of(world).prefixes
    most_unplaced = 0
    while world.core.num_live:
        assert world.step() is not None or world.in_flight or not world.core.num_live
        most_unplaced = max(most_unplaced, len(prefixes._unplaced))
    assert most_unplaced > 20, "nothing was left for later: nothing was tested"
    assert list(world.ends).index(other) <= 3, "it does not wait for the twins"
    assert set(world.ends) == {*requests, other}
    assert world.device.num_computed_tokens < len(stem) + 9 + 61 * (1 + 2 + BLOCK)
    nothing_is_left(world)


# ---- ageing ---------------------------------------------------------------------------------------


def test_the_oldest_is_passed_only_so_often_by_prompts_that_are_cached() -> None:
    world = WatchedWorld(max_num_seqs=1, block_size=BLOCK)
    stem = list(range(1, 13))
    world.submit(stem, max_tokens=1)
    world.run()
    num_before = len(world.ends)
    world.submit([*stem, 900], max_tokens=1)
    poor = world.submit([800] * 9, max_tokens=1)
    for number in range(3 * MOST_PASSED):
        world.submit([*stem, number], max_tokens=1)
        world.step()
    world.run()
    assert list(world.ends).index(poor) - num_before == MOST_PASSED + 1


def test_every_seventeenth_admission_is_by_age_even_where_all_prompts_are_cached_but_a_few() -> None:
    world = WatchedWorld(max_num_seqs=2, block_size=BLOCK)
    stem = list(range(1, 13))
    world.submit(stem, max_tokens=1)
    world.run()
    poor = [world.submit([800 + number] * 9, max_tokens=1) for number in range(4)]
    rich = [world.submit([*stem, 20 + number], max_tokens=1) for number in range(120)]
    world.run()
    places = [list(world.ends).index(request) for request in poor]
    assert places == sorted(places)
    assert max(places) <= (len(poor) + 1) * (MOST_PASSED + 1) + world.config.running_limit
    assert list(world.ends).index(rich[-1]) > max(places)


def test_an_aged_twin_is_deferred_no_more() -> None:
    world = WatchedWorld(max_num_seqs=3, block_size=BLOCK, max_num_batched_tokens=6)
    stem = [40 + number for number in range(400)]
    world.submit([*stem, 1], max_tokens=1)
    twin = world.submit([*stem, 2], max_tokens=1)
    for number in range(MOST_PASSED + 2):
        assert twin in world.waiting()
        passing = world.submit([900 - number], max_tokens=1)
        while passing not in world.ends and twin in world.waiting():
            world.step()
        if twin not in world.waiting():
            break
    assert number >= MOST_PASSED - 1
    world.run()
    world.check_outputs()


# ---- anything at all ------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_after_any_operation_the_order_is_that_of_a_lookup_for_everybody(seed: int) -> None:
    run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_after_any_operation_in_many_runs(first: int) -> None:
    for seed in range(first, first + 100):
        try:
            run(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


def run(seed: int) -> None:
    """Requests over few tokens and long stems, aborts, failures, deaths, resets, on pools of any size."""
    rng = random.Random(seed)
    pick, chance = rng.choice, rng.random
    world = WatchedWorld(
        blocks=pick([10, 20, 60]),
        host_blocks=pick([0, 0, 8, 40]),
        block_size=pick([1, 2, 4]),
        vocab_size=50,
        max_num_seqs=pick([1, 2, 5]),
        max_num_batched_tokens=pick([1, 3, 16, 64]),
        max_steps_in_flight=pick([1, 2]),
        enable_prefix_caching=chance() < 0.9,
        preemption_mode=pick(["auto", "swap"]),
    )
    if chance() < 0.5:
        world.without_reserve()
    is_deadly = chance() < 0.5
    pool = world.core.capacity.num_device_blocks * world.config.block_size
    stems = [[rng.randrange(3) for _ in range(pool)] for _ in range(2)]
    for _ in range(rng.randint(5, 40)):
        if chance() < 0.6:
            length = rng.randint(1, min(pool - 1, 40))
            head = pick(stems)[: rng.randint(0, length)]
            prompt = head + [rng.randrange(3) for _ in range(length - len(head))]
            world.submit(
                prompt, max_tokens=rng.randint(1, 6), n=1 if is_deadly else pick([1, 2]), cache_salt=pick([None, None, "a"])
            )
        if chance() < 0.1 and world.admits:
            world.abort(pick(list(world.admits)))
        if chance() < 0.05:
            world.reset()
        if is_deadly and chance() < 0.1:
            world.relive()
        if world.plan() is None or chance() < 0.6:
            if world.in_flight:
                world.finish()
            while chance() < 0.6 and world.copy():
                pass
    while world.core.num_live or world.in_flight:
        if world.plan() is None and world.in_flight:
            world.finish()
        world.copy()
    world.check_outputs()
    nothing_is_left(world)
    for request in world.admits:
        assert world.reason(request) in ("length", "abort") or request in world.culprits
    assert all(seq.state is not State.WAITING for seq in world.core.table.sequences.values())
