"""A look at the scheduler from outside: what is shared, who is slow, what it costs, and that it changes nothing."""

import time

from repertory.actors.scheduling import looking
from repertory.actors.scheduling.looking import MOST_NODES, metrics_of, shared_prefixes, view_of
from repertory.protocol.messages import Credit
from repertory.protocol.view import MOST_PREFIXES, MOST_SLOWEST
from repertory.tests.scheduling.world import World


def prefixes(world):
    return shared_prefixes(world.core.cache.tree)


def test_a_prefix_that_several_hold_is_shared_as_far_as_they_agree():
    world = World()
    common = list(range(100, 120))
    for number in range(3):
        world.submit([*common, *[number] * 8], max_tokens=50)
        world.step()
    (found,) = prefixes(world)
    assert (found.num_tokens, found.num_holders, found.num_branches) == (20, 3, 3)
    assert (found.num_device_tokens, found.num_host_tokens) == (20, 0)


def test_prefixes_of_prefixes_are_told_apart_and_those_that_save_the_most_come_first():
    world = World()
    system, tools = list(range(100, 140)), list(range(200, 208))
    for number in range(2):
        world.submit([*system, *tools, *[number] * 8], max_tokens=50)
        world.step()
    for number in range(2, 5):
        world.submit([*system, *[number] * 8], max_tokens=50)
        world.step()
    found = [(one.num_tokens, one.num_holders) for one in prefixes(world)]
    assert found == [(40, 5), (48, 2)]


def test_what_one_request_holds_alone_is_not_shared():
    world = World()
    world.submit(list(range(40)), max_tokens=50)
    world.step()
    assert prefixes(world) == []


def test_cache_that_goes_on_in_several_ways_is_shared_though_nobody_holds_it():
    world = World()
    for number in range(4):
        world.submit([*range(100, 116), *[number] * 8], max_tokens=2)
    world.run()
    (found,) = prefixes(world)
    assert (found.num_tokens, found.num_holders, found.num_branches) == (16, 0, 4)


def test_copies_on_the_host_are_told():
    world = World(blocks=12, host_blocks=40, max_num_seqs=3, preemption_mode="swap")
    world.without_reserve()
    for number in range(3):
        world.submit([*range(100, 108), *[number] * 4], max_tokens=24)
    for _ in range(200):
        world.step()
        if any(one.num_host_tokens for one in prefixes(world)):
            break
    (found,) = [one for one in prefixes(world) if one.num_tokens == 8]
    assert found.num_host_tokens == 8


def test_a_view_is_bounded_whatever_there_is():
    world = World(blocks=2048, max_num_seqs=64)
    for number in range(60):
        world.submit([number // 2, number // 2, 7, 7, *[number] * 8], max_tokens=50, cache_salt=f"s{number // 2}")
        world.step()
    view = view_of(world.core, world.now, [], num_frontends=0)
    assert len(view.prefixes) == MOST_PREFIXES
    assert len(view.slowest) == MOST_SLOWEST
    ages = [one.age_s for one in view.slowest]
    assert ages == sorted(ages, reverse=True)


def test_a_large_tree_is_not_walked_to_its_end(monkeypatch):
    world = World(blocks=2048, max_num_seqs=64, max_num_batched_tokens=4096)
    for number in range(64):
        world.submit([number, 1, 2, 3, *[number] * 4], max_tokens=50)
        world.submit([number, 1, 2, 3, *[number + 100] * 4], max_tokens=50)
    world.step()
    world.step()
    assert len(prefixes(world)) == MOST_PREFIXES
    monkeypatch.setattr(looking, "MOST_NODES", 5)
    assert len(prefixes(world)) <= 4, "the root is one of the five"
    assert MOST_NODES <= 10_000


def stages(world):
    return [one.stage for one in view_of(world.core, world.now, [], num_frontends=0).slowest]


def test_looking_changes_nothing_and_does_not_count_itself():
    world = World(blocks=24, host_blocks=16, max_num_seqs=4)
    world.without_reserve()
    for number in range(8):
        world.submit([*range(100, 108), *[number] * 6], max_tokens=12)
    for _ in range(20):
        world.step()
        before = metrics_of(world.core, [], num_frontends=0)
        view_of(world.core, world.now, [], num_frontends=0)
        assert metrics_of(world.core, [], num_frontends=0) == before
    world.run()
    world.check_outputs()


def test_a_request_of_several_sequences_is_one_request_where_its_furthest_sequence_is():
    world = World(max_num_seqs=2)
    world.submit([1] * 8, n=4, seed=5, max_tokens=30)
    for _ in range(4):
        world.step()
    (one,) = view_of(world.core, world.now, [], num_frontends=0).slowest
    assert one.stage == "decode"
    assert one.num_output_tokens == sum(len(tokens) for tokens in world.given.values()) > 2


def test_a_paused_request_says_so():
    world = World(credit_window=4)
    world.submit([1] * 8, max_tokens=30)
    for _ in range(10):
        world.step()
    view = view_of(world.core, world.now, [], num_frontends=0)
    assert view.slowest[0].stage == "paused"
    assert view.stats.num_paused == 1
    assert metrics_of(world.core, [], num_frontends=0).num_credits == 0


def test_the_stage_is_that_of_the_journey_whatever_the_state():
    """One that does not fit waits for blocks, and one that may go on waits for its turn: their journeys say so too."""
    world = World(blocks=8, credit_window=4, max_num_seqs=4)
    paused = world.submit([1] * 8, max_tokens=30)
    for _ in range(10):
        world.step()
    world.core.on_credit(Credit(paused, 4))
    assert stages(world) == ["queue"]
    world.submit([2] * 8, max_tokens=30)
    world.submit([3] * 28, max_tokens=2)
    world.plan()
    assert stages(world)[2] == "blocks"
    live = [seq for request in world.core.table.requests() for seq in request.live()]
    assert stages(world) == [seq.traveller.stage for seq in live]


def test_credits_are_what_readers_still_allow():
    world = World(credit_window=10)
    world.submit([1] * 8, max_tokens=30)
    world.submit([2] * 8, max_tokens=30)
    before = metrics_of(world.core, [], num_frontends=0).num_credits
    assert before == 20
    for _ in range(3):
        world.step()
    given = sum(len(tokens) for tokens in world.given.values())
    assert 0 < metrics_of(world.core, [], num_frontends=0).num_credits <= before - given


def test_a_snapshot_takes_no_time_to_speak_of():
    world = World(blocks=4096, max_num_seqs=64, max_num_batched_tokens=4096)
    for number in range(64):
        world.submit([number] * 40, max_tokens=50)
    world.step()
    began = time.thread_time()
    for _ in range(20):
        view_of(world.core, world.now, [], num_frontends=0)
    assert (time.thread_time() - began) / 20 < 0.02
