"""A slow reader holds only itself: no token beyond its credit, no slot, no block, nobody behind it; with credit it goes on."""

from __future__ import annotations

import pytest

from repertory.actors.scheduling.reports import Finished, Paused, Preempted
from repertory.protocol.ids import RequestId
from repertory.protocol.messages import Admit
from repertory.protocol.sampling import SamplingParams

from .lossy import MOST_TURNS, LossyWorld, turn


def settle(world: LossyWorld) -> None:
    """Turn until nothing can be done without a message or the clock."""
    for _ in range(MOST_TURNS):
        turn(world)
        if not world.in_flight and world.plan() is None:
            return
    raise AssertionError("it goes on for ever")


def num_given(world: LossyWorld, request: RequestId) -> int:
    return len(world.tokens.get(request, []))


# ---- as far as its credit -------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("window", [1, 3, 16])
def test_a_request_stops_exactly_at_its_credit_and_holds_nothing(window: int, in_flight: int) -> None:
    world = LossyWorld(credit_window=window, max_steps_in_flight=in_flight)
    request = world.submit([1, 2, 3, 4, 5], max_tokens=40)
    settle(world)
    assert num_given(world, request) == window
    assert world.paused() == [request]
    stats = world.core.stats()
    assert (stats.num_paused, stats.num_running, stats.num_preempted) == (1, 0, 0)
    assert stats.device_blocks.referenced == 0
    assert stats.num_preemptions == {"recompute": 0, "swap": 0}
    seq = world.sequence(request)
    assert seq is not None and not seq.holding.block_table
    assert [type(report) for report in world.reports] == [Paused]


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("grants", [[1], [2], [1, 5], [7], [50]])
@pytest.mark.parametrize("window", [1, 3, 1024])
def test_whatever_is_granted_and_when_the_tokens_are_those_of_a_fast_reader(
    window: int, grants: list[int], in_flight: int
) -> None:
    world = LossyWorld(credit_window=window, max_steps_in_flight=in_flight)
    request = world.submit([1, 2, 3, 4, 5, 6, 7], max_tokens=30, seed=5)
    granted = window
    while world.core.num_live:
        settle(world)
        assert num_given(world, request) == min(30, granted)
        for count in grants:
            world.grant(request, count)
            granted += count
    world.check_outputs()
    world.check_nothing_is_left()


def test_a_request_that_ends_with_its_last_credit_is_not_paused() -> None:
    world = LossyWorld(credit_window=4, max_steps_in_flight=2)
    request = world.submit([1, 2, 3], max_tokens=4)
    settle(world)
    assert world.reason(request) == "length"
    assert not any(isinstance(report, Paused) for report in world.reports)
    world.check_nothing_is_left()


def test_a_reader_that_wants_only_the_end_has_unlimited_credit() -> None:
    world = LossyWorld(credit_window=1)
    params = SamplingParams(temperature=0.0, max_tokens=30, output_kind="final_only")
    message = Admit(RequestId(1), "", [1, 2, 3], params, 0.0)
    world.admits[RequestId(1)] = message
    world.core.on_admit(message, world.now)
    settle(world)
    assert num_given(world, RequestId(1)) == 30
    world.check_outputs()


def test_a_window_smaller_than_a_chunked_prompt_is_a_matter_of_output_only() -> None:
    world = LossyWorld(credit_window=1, max_num_batched_tokens=2)
    request = world.submit(list(range(20)), max_tokens=3)
    settle(world)
    assert num_given(world, request) == 1
    world.grant(request, 2)
    settle(world)
    world.check_outputs()


# ---- in nobody's way ------------------------------------------------------------------------------


def test_a_paused_request_gives_its_slot_and_its_place_in_the_line_to_the_next() -> None:
    world = LossyWorld(credit_window=2, max_num_seqs=1)
    slow = world.submit([1] * 5, max_tokens=9)
    quick = world.submit([2] * 5, max_tokens=2)
    settle(world)
    assert world.paused() == [slow]
    assert world.reason(quick) == "length"


def test_its_blocks_are_cache_for_others_and_for_itself() -> None:
    world = LossyWorld(credit_window=3, blocks=8)
    slow = world.submit([1] * 9, max_tokens=9)
    settle(world)
    assert world.core.stats().device_blocks.cached == 2
    computed = world.core.num_computed_tokens
    world.grant(slow, 1)
    turn(world)
    assert world.core.num_computed_tokens == computed + 12 - 8
    big = world.submit([7] * 28, max_tokens=2)
    settle(world)
    assert world.reason(big) == "length", "all that a paused request has is evictable"
    world.grant(slow, 100)
    settle(world)
    world.check_outputs()


def test_with_credit_it_comes_back_at_its_rank() -> None:
    world = LossyWorld(credit_window=1, max_num_seqs=1)
    first, second, third = (world.submit([number] * 5, max_tokens=3) for number in (1, 2, 3))
    settle(world)
    assert world.paused() == [first, second, third]
    for request in (third, first, second):
        world.grant(request, 1)
    assert world.preempted() == [first, second, third]
    turn(world)
    assert (num_given(world, first), num_given(world, second)) == (2, 1)
    for request in (first, second, third):
        world.grant(request, 9)
    settle(world)
    world.check_outputs()


def test_it_comes_back_before_those_that_wait() -> None:
    world = LossyWorld(credit_window=1, max_num_seqs=1)
    slow = world.submit([1] * 5, max_tokens=3)
    settle(world)
    waiting = world.submit([2] * 5, max_tokens=3)
    world.grant(slow, 9)
    step = world.plan()
    assert step is not None and set(world.rows(step)) == {slow}
    world.grant(waiting, 9)
    settle(world)
    world.check_outputs()


def test_a_request_preempted_while_it_is_out_of_credit_is_paused_and_not_brought_back() -> None:
    world = LossyWorld(blocks=5, max_steps_in_flight=2)
    world.without_reserve()
    first = world.submit([1] * 4, max_tokens=14)
    second = world.submit([2] * 4, max_tokens=14)
    while not world.preempted():
        turn(world)
    seq = world.sequence(second)
    assert seq is not None and world.preempted() == [second]
    seq.credit_length = len(seq.log) + seq.in_flight  # what it has got meanwhile was the last of its credit
    third = world.submit([3] * 4, max_tokens=1)
    settle(world)
    assert world.paused() == [second]
    assert {world.reason(first), world.reason(third)} == {"length"}
    world.grant(second, 99)
    settle(world)
    world.check_outputs()
    world.check_nothing_is_left()


def test_a_token_in_flight_at_a_preemption_may_be_the_last_of_the_credit() -> None:
    world = LossyWorld(credit_window=2, blocks=3, max_steps_in_flight=2)
    world.without_reserve()
    first = world.submit([1] * 3, max_tokens=8)
    second = world.submit([2] * 3, max_tokens=8)
    world.grant(first, 99)
    settle(world)
    assert any(isinstance(report, Preempted) for report in world.reports) or world.paused() == [second]
    world.grant(second, 99)
    settle(world)
    world.check_outputs()
    world.check_nothing_is_left()


# ---- messages out of the ordinary -----------------------------------------------------------------


def test_credit_for_a_request_that_is_not_there_is_a_no_op() -> None:
    world = LossyWorld(credit_window=2)
    request = world.submit([1] * 3, max_tokens=2)
    world.grant(RequestId(77), 5)
    settle(world)
    world.grant(request, 5)
    world.check_outputs()
    world.check_nothing_is_left()


def test_credit_that_comes_early_counts() -> None:
    world = LossyWorld(credit_window=1)
    request = world.submit([1] * 3, max_tokens=9)
    world.grant(request, 8)
    settle(world)
    assert world.reason(request) == "length"
    assert not any(isinstance(report, Paused) for report in world.reports)


def test_a_paused_request_can_be_aborted() -> None:
    world = LossyWorld(credit_window=1)
    request = world.submit([1] * 3, max_tokens=9)
    settle(world)
    world.abort(request)
    assert world.reason(request) == "abort"
    world.grant(request, 5)
    world.check_outputs()
    world.check_nothing_is_left()


def test_a_paused_request_survives_the_device_and_was_not_present_at_its_death() -> None:
    world = LossyWorld(credit_window=2, max_steps_in_flight=2)
    slow = world.submit([1] * 5, max_tokens=9)
    settle(world)
    other = world.submit([2] * 5, max_tokens=9)
    for _ in range(3):
        world.grant(other, 2)
        world.plan()
        world.relive()
        turn(world)
    assert world.paused()[0] == slow
    seq = world.sequence(slow)
    assert seq is not None and seq.num_deaths == 0
    for request in (slow, other):
        world.grant(request, 99)
    settle(world)
    world.check_outputs()
    assert not world.failed()


# ---- patience -------------------------------------------------------------------------------------


def test_a_reader_that_takes_nothing_for_too_long_ends_its_request_with_a_reason() -> None:
    world = LossyWorld(credit_window=2, max_pause_s=5.0)
    slow = world.submit([1] * 3, max_tokens=9)
    settle(world)
    wakeup = world.core.next_wakeup()
    assert wakeup is not None
    paused_at = wakeup - 5.0
    world.now = wakeup - 0.001
    assert world.plan() is None
    assert world.paused() == [slow]
    world.now = wakeup
    world.plan()
    assert world.reason(slow) == "error"
    problem = world.ends[slow].problem
    assert problem is not None
    assert (problem.kind, problem.message) == ("ReaderTooSlowError", "the reader took nothing for 5 s (max_pause_s)")
    (account,) = [report for report in world.reports if isinstance(report, Finished)]
    assert account.finish_reason == "error" and account.problem == problem
    assert paused_at >= 0
    world.check_outputs()
    world.check_nothing_is_left()


def test_each_pause_has_a_patience_of_its_own() -> None:
    world = LossyWorld(credit_window=1, max_pause_s=5.0)
    request = world.submit([1] * 3, max_tokens=9)
    for _ in range(4):
        settle(world)
        assert world.paused() == [request]
        world.now += 4.0
        world.plan()
        world.grant(request, 1)
    assert request not in world.ends


def test_those_paused_first_are_ended_first_and_the_others_in_their_time() -> None:
    world = LossyWorld(credit_window=1, max_pause_s=5.0)
    first = world.submit([1] * 3, max_tokens=9)
    settle(world)
    world.now += 2.0
    second = world.submit([2] * 3, max_tokens=9)
    settle(world)
    world.now += 3.0
    world.plan()
    assert world.paused() == [second]
    assert list(world.ends) == [first]
    world.now = world.core.next_wakeup() or 0.0
    world.plan()
    assert list(world.ends) == [first, second]


def test_patience_runs_out_while_there_is_no_device_too() -> None:
    world = LossyWorld(credit_window=1, max_pause_s=5.0)
    request = world.submit([1] * 3, max_tokens=9)
    settle(world)
    world.lose()
    wakeup = world.core.next_wakeup()
    assert wakeup is not None
    world.now = wakeup
    world.core.plan(world.now)
    world._look()
    assert world.reason(request) == "error"
