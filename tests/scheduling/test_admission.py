"""Who may come in, when, and what a request that may not yet leaves behind: nothing."""

from __future__ import annotations

import pytest

from repertory.protocol.errors import error_from

from .world import World


def numbers(world: World) -> tuple[object, ...]:
    """All that must not move while an admission fails."""
    stats = world.core.stats()
    return (
        stats.prefix_cache_queries,
        stats.prefix_cache_hits,
        stats.num_waiting,
        world.core.cache.num_reserved,
        world.core.cache.tree.num_evictable,
        sum(1 for _ in world.core.cache.tree.nodes()),
    )


def test_the_first_that_does_not_fit_ends_admission() -> None:
    world = World(blocks=10)
    world.submit([1] * 20, max_tokens=4)
    world.step()
    large, small = world.submit([2] * 20, max_tokens=1), world.submit([3], max_tokens=1)
    world.step()
    assert world.running() == [1]
    assert world.waiting() == [large, small], "the small one fits, and does not pass"
    world.run()
    assert world.ends.keys() == {1, large, small}


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_failed_admission_leaves_no_trace_for_as_long_as_it_fails(in_flight: int) -> None:
    world = World(blocks=6, max_steps_in_flight=in_flight)
    world.without_reserve()
    world.submit([9] * 4, max_tokens=1)
    world.run()
    world.submit([1] * 12, max_tokens=8)  # grows to five blocks; the block of nines stays cached
    world.step()
    late = world.submit([9] * 4 + [8] * 16, max_tokens=1)
    world.step()
    before = numbers(world)
    for _ in range(4):
        assert world.step() is not None
        assert numbers(world)[:3] == before[:3]
        assert world.waiting() == [late]
        seq = world.sequence(late)
        assert seq is not None
        assert seq.holding.node is None
        assert not seq.holding.block_table
        assert seq.holding.reserved == 0
    assert world.core.stats().device_blocks.cached == 1, "what it would find may still be evicted"
    world.run()
    world.check_outputs()
    assert world.opens[late].num_cached_tokens == 4
    assert world.core.stats().prefix_cache_queries == 4 + 12 + 20
    world.check_nothing_is_left()


def test_a_request_that_is_aborted_while_its_admission_fails_leaves_nothing() -> None:
    world = World(blocks=6)
    world.submit([1] * 16, max_tokens=6)
    world.step()
    late = world.submit([1] * 8 + [2] * 12, max_tokens=1)
    world.step()
    before = numbers(world)
    world.abort(late)
    assert numbers(world)[3:] == before[3:]
    assert world.reason(late) == "abort"
    world.run()
    world.check_outputs()
    world.check_nothing_is_left()


def test_running_requests_keep_a_reserve_for_their_growth_and_an_idle_engine_keeps_none() -> None:
    world = World(blocks=10)
    world.submit([1] * 4, max_tokens=36)
    world.submit([2] * 28, max_tokens=4)  # seven blocks, and one runs, and three are kept
    world.step()
    assert world.running() == [1]
    world.run(1)
    world.run()
    world.check_outputs()
    alone = World(blocks=10)
    alone.submit([1] * 39, max_tokens=1)
    assert alone.run() == 1


def test_no_more_run_than_max_num_seqs() -> None:
    world = World(max_num_seqs=3)
    for number in range(8):
        world.submit([number], max_tokens=3)
    while len(world.ends) < 8:
        step = world.step()
        assert step is None or len(step.seq_ids) <= 3
        assert len(world.running()) <= 3
    world.check_outputs()


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "given"), [(14, 2), (15, 1)])
@pytest.mark.parametrize("max_tokens", [None, 10])
def test_a_prompt_that_leaves_room_gets_what_room_there_is(prompt: int, given: int, max_tokens: int | None) -> None:
    world = World(max_model_len=16)
    request = world.submit([5] * prompt, max_tokens=max_tokens)
    world.run()
    assert world.reason(request) == "length"
    assert len(world.tokens[request]) == given
    world.check_outputs()


@pytest.mark.parametrize("prompt", [16, 17])
@pytest.mark.parametrize("max_tokens", [None, 1, 10])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(prompt: int, max_tokens: int | None) -> None:
    world = World(max_model_len=16)
    request = world.submit([5] * prompt, max_tokens=max_tokens)
    problem = world.refusals[request]
    assert problem is not None
    assert (problem.kind, problem.field) == ("NeverFitsError", "prompt")
    assert str(prompt) in problem.message
    assert "max_model_len is 16" in problem.message
    assert world.plan() is None
    assert world.core.num_live == 0


def test_a_prompt_over_the_pool_is_refused_and_the_next_request_is_served() -> None:
    world = World(blocks=10, max_model_len=128)
    large = world.submit([5] * 60)
    problem = world.refusals[large]
    assert problem is not None
    assert "61" in problem.message
    assert "the KV pool holds 40 tokens" in problem.message
    small = world.submit([5] * 5)
    world.run(small)
    world.check_outputs()


def test_a_prompt_of_all_the_pool_but_one_token_runs() -> None:
    world = World(blocks=10)
    request = world.submit([5] * 39, max_tokens=None)
    world.run()
    assert world.reason(request) == "length"
    world.check_outputs()


def test_max_tokens_one_more_than_fits_is_cut_and_the_end_is_length() -> None:
    world = World(max_model_len=16)
    exact, over = world.submit([5] * 6, max_tokens=10), world.submit([6] * 6, max_tokens=11)
    world.run()
    assert [len(world.tokens[request]) for request in (exact, over)] == [10, 10]
    assert world.reason(exact) == world.reason(over) == "length"


def test_a_full_queue_refuses_with_429_and_takes_the_next_once_there_is_room() -> None:
    world = World(max_num_seqs=1, max_num_queued=2)
    world.submit([1])
    world.step()
    world.submit([2])
    world.submit([3])
    refused = world.submit([4])
    problem = world.refusals[refused]
    assert problem is not None
    assert error_from(problem).http_status == 429
    world.run(1)
    world.step()
    assert world.submit([5]) not in world.refusals
    world.run()


def test_a_draining_engine_refuses_and_finishes_what_it_has() -> None:
    world = World(max_num_seqs=1)
    running, waiting = world.submit([1]), world.submit([2])
    world.step()
    world.core.draining = True
    problem = world.refusals[world.submit([3])]
    assert problem is not None
    assert problem.kind == "EngineDrainingError"
    world.run()
    assert world.ends.keys() == {running, waiting}


# ---- batches ------------------------------------------------------------------------------------


def test_static_lets_nobody_join_a_batch_that_runs() -> None:
    world = World(scheduling_policy="static")
    first, second = world.submit([1], max_tokens=2), world.submit([2], max_tokens=6)
    world.step()
    late = world.submit([3], max_tokens=1)
    while second not in world.ends:
        assert world.running()[0] in (first, second)
        assert world.waiting() == [late]
        world.step()
    world.run()
    world.check_outputs()


def test_static_lets_nobody_join_a_batch_whose_last_member_was_preempted_or_rolled_back() -> None:
    world = World(scheduling_policy="static")
    first, second = world.submit([1] * 8, max_tokens=8), world.submit([1] * 8, max_tokens=8)
    world.poisoned.add(first)
    world.plan()
    late = world.submit([3], max_tokens=1)
    world.finish()
    assert first in world.ends
    while second not in world.ends:
        assert world.waiting() == [late]
        world.step()
    world.run()


def test_a_delay_gathers_a_batch_and_says_when_to_ask_again() -> None:
    world = World(scheduling_delay_s=0.5)
    world.now = 100.0
    world.submit([1])
    assert world.plan() is None
    assert world.core.next_wakeup() == 100.5
    world.now = 100.4
    world.submit([2])
    assert world.plan() is None
    assert world.core.next_wakeup() == 100.5, "the wait is the first one's"
    world.now = 100.5
    step = world.plan()
    assert step is not None
    assert len(step.seq_ids) == 2
    assert world.core.next_wakeup() is None


def test_a_delay_ends_when_there_is_company_enough() -> None:
    world = World(scheduling_delay_s=0.5, max_num_seqs=2)
    world.submit([1])
    assert world.plan() is None
    world.submit([2])
    assert world.plan() is not None


@pytest.mark.parametrize("in_flight", [1, 2])
def test_nobody_is_asked_to_plan_again_while_no_step_may_be_planned(in_flight: int) -> None:
    # A wakeup in the past, and no answer yet: whoever heeded it would turn in circles until the device is done.
    world = World(scheduling_delay_s=0.5, max_steps_in_flight=in_flight)
    world.submit([1], max_tokens=50)
    world.now = 0.5
    world.plan()
    world.finish()
    world.submit([2])
    while world.plan() is not None:
        pass
    world.now = 10.0
    assert world.core.next_wakeup() is None
    world.run()


def test_a_delay_factor_holds_back_only_beside_running_requests() -> None:
    world = World(scheduling_delay_factor=3.0, step_s=0.1)
    first = world.submit([1], max_tokens=20)
    assert world.step() is not None, "nothing runs: no wait"
    late = world.submit([2], max_tokens=1)
    queued = world.now
    while late not in world.running() and late not in world.ends:
        world.step()
    waited = world.opens[late].first_scheduled_s - queued
    assert 3 * 0.1 <= waited < 3 * 0.1 + 2 * 0.1
    assert first not in world.ends


def test_a_delay_in_seconds_wins_over_the_factor() -> None:
    world = World(scheduling_delay_s=0.2, scheduling_delay_factor=1000.0)
    world.submit([1])
    assert world.plan() is None
    assert world.core.next_wakeup() == 0.2
