"""The device dies and another takes over: every request goes on from its log, and only one that kills it alone is failed."""

from __future__ import annotations

import pytest

from repertory.protocol.ids import Epoch, RequestId
from repertory.protocol.messages import DeviceLost, Resend, StepDone

from .lossy import MOST_TURNS, LossyWorld, run_to_the_end, turn, until

CHUNKED = {"max_num_batched_tokens": 4}


def crowd(**settings: object) -> LossyWorld:
    """Three requests of different lengths, the second drawing at random."""
    world = LossyWorld(**settings)
    world.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=7)
    world.submit([1, 2, 3, 4, 5, 60], max_tokens=5, seed=3)
    world.submit([80, 81], max_tokens=8)
    return world


# ---- everybody goes on ----------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("budget", [1, 5, 512])
def test_a_death_after_any_operation_changes_no_output(budget: int, in_flight: int) -> None:
    settings = {"max_num_batched_tokens": budget, "max_steps_in_flight": in_flight}
    moment, was_in_time = 0, True
    while was_in_time:
        world, num_operations, was_in_time = crowd(**settings), 0, False
        while world.core.num_live or world.in_flight:
            if num_operations == moment:
                was_in_time = True
                world.relive()
            if world.plan() is None and world.in_flight:
                world.finish()
            num_operations += 1
        world.check_outputs()
        world.check_nothing_is_left()
        assert not world.failed()
        moment += 1
    assert moment > 10


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_death_after_every_token_changes_no_output(in_flight: int) -> None:
    world = crowd(max_steps_in_flight=in_flight)
    while world.core.num_live:
        num_tokens = sum(map(len, world.tokens.values()))
        until(world, lambda before=num_tokens: sum(map(len, world.tokens.values())) > before)  # type: ignore[misc]
        world.relive()
    run_to_the_end(world)
    assert world.num_lives > 8


def test_nothing_is_planned_until_the_new_device_is_there_and_requests_may_come_and_go_meanwhile() -> None:
    world = crowd()
    turn(world)
    world.lose()
    late = world.submit([5, 6, 7])
    world.abort(RequestId(2))
    assert world.plan() is None
    assert world.core.next_wakeup() is None
    assert world.reason(RequestId(2)) == "abort"
    world.restart()
    run_to_the_end(world)
    assert world.reason(late) == "length"


def test_the_others_are_told_of_a_foreseen_end_whose_step_was_lost_only_once() -> None:
    world = LossyWorld(max_steps_in_flight=2)
    request = world.submit([1, 2, 3], max_tokens=1)
    assert world.plan() is not None
    world.relive()
    assert request not in world.ends
    run_to_the_end(world)
    assert world.reason(request) == "length"


def test_one_that_ended_while_its_step_was_in_flight_stays_ended() -> None:
    world = crowd(max_steps_in_flight=2)
    turn(world)
    world.plan()
    world.abort(RequestId(1))
    world.relive()
    assert world.sequence(RequestId(1)) is None
    run_to_the_end(world)


def test_a_preempted_request_with_a_token_in_flight_samples_it_again() -> None:
    world = LossyWorld(blocks=4, max_steps_in_flight=2)
    world.without_reserve()
    for number in range(2):
        world.submit([100 + number] * 4, max_tokens=12)
    for _ in range(MOST_TURNS):
        if world.preempted():
            break
        world.plan() or world.finish()
    victim = world.sequence(world.preempted()[0])
    assert victim is not None and victim.in_flight == 1
    world.relive()
    run_to_the_end(world)


def test_requests_that_had_not_begun_still_count_what_they_ask_of_the_cache() -> None:
    world = LossyWorld(max_num_seqs=1)
    world.submit([1] * 9, max_tokens=2)
    second = world.submit([1] * 9, max_tokens=2)
    turn(world)
    assert world.waiting() == [second]
    world.relive()
    run_to_the_end(world)
    assert world.core.stats().prefix_cache_queries == 18
    assert world.opens[second].num_cached_tokens == 8


def test_a_reset_detokenizer_is_told_everything_by_a_core_that_lost_its_device() -> None:
    world = crowd()
    until(world, lambda: len(world.tokens.get(RequestId(3), [])) == 3)
    world.lose()
    world.core.on_resend(Resend(RequestId(3)), world.now)
    (told,) = world.core.take_outputs(world.now)
    assert told.token_ids == world.tokens[RequestId(3)]  # type: ignore[attr-defined]
    world.restart()
    run_to_the_end(world)


# ---- epochs ---------------------------------------------------------------------------------------


def test_an_answer_of_an_earlier_device_is_dropped() -> None:
    world = crowd(max_steps_in_flight=2)
    turn(world)
    stale = world.device.run_step(world.in_flight[0]) if world.in_flight or world.plan() else None
    assert isinstance(stale, StepDone)
    world.lose()
    before = dict(world.tokens)
    world.answer(stale)
    world.restart()
    world.answer(stale)
    world.plan()
    world.answer(stale)  # the new device's first step has the same number
    assert world.tokens == before
    assert world.core.num_in_flight == 1
    run_to_the_end(world)


def test_a_death_is_counted_once_however_often_it_is_told() -> None:
    world = crowd()
    turn(world)
    world.plan()
    world.lose()
    for epoch in (0, 1, 2):
        world.core.on_device_lost(DeviceLost(Epoch(epoch), "again"), world.now)
    assert {seq.num_deaths for seq in world.alive()} <= {0, 1}
    world.restart()
    world.plan()
    world.core.on_device_lost(DeviceLost(Epoch(1), "and again"), world.now)
    assert world.is_up
    assert world.core.num_in_flight == 1
    run_to_the_end(world)


def test_a_device_that_is_lost_while_it_opens_leaves_no_trace() -> None:
    world = crowd()
    turn(world)
    world.lose()
    world.num_lives += 1
    world.core.on_device_lost(DeviceLost(Epoch(world.num_lives), "it did not open"), world.now)
    assert not world.is_up
    world.restart()
    assert world.core.epoch == 3
    run_to_the_end(world)
    assert world.core.num_restarts == 1


# ---- suspects -------------------------------------------------------------------------------------


def test_only_those_in_unanswered_steps_are_counted_as_present() -> None:
    world = LossyWorld(max_num_seqs=3, max_num_batched_tokens=1)
    for number in range(4):
        world.submit([10 * number + 1] * 3, max_tokens=3)
    turn(world)
    step = world.plan()
    assert step is not None
    there = {RequestId(seq_id) for seq_id in step.seq_ids}
    assert len(there) < 4
    world.lose()  # it looks at the count of each
    assert set(world.deaths) == there
    world.restart()
    world.plan()
    world.finish()
    world.lose()  # between two steps nobody was present
    assert max(world.deaths.values(), default=0) <= 1
    world.restart()
    run_to_the_end(world)


def test_a_token_between_two_deaths_clears_the_count() -> None:
    world = crowd()
    for _ in range(2):
        world.plan()
        world.lose()
        world.restart()
        turn(world)
    assert world.suspects() == []
    run_to_the_end(world)
    assert not world.failed()


def test_after_two_deaths_in_a_row_those_present_run_one_at_a_time_in_their_order() -> None:
    world = crowd(max_steps_in_flight=2, **CHUNKED)
    world.submit([90] * 9, max_tokens=2)
    for _ in range(2):
        world.plan()
        world.relive()
    suspects = world.suspects()
    assert len(suspects) >= 2
    cleared = []
    while world.suspects():
        (left, *_) = world.suspects()
        turn(world)
        if left not in world.suspects():
            cleared.append(left)
    assert cleared == sorted(suspects)
    run_to_the_end(world)
    assert not world.failed()


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("killer", [1, 2, 3])
def test_a_killer_fails_alone_within_four_deaths(killer: int, chunked: bool, caching: bool, in_flight: int) -> None:
    world = crowd(
        max_steps_in_flight=in_flight, max_num_batched_tokens=3, enable_chunked_prefill=chunked, enable_prefix_caching=caching
    )
    world.killers.add(RequestId(killer))
    run_to_the_end(world)
    assert world.failed() == [killer]
    assert world.num_lives <= 1 + 4
    problem = world.ends[RequestId(killer)].problem
    assert problem is not None and problem.kind == "RequestFailedError"
    assert "died 4 times" in problem.message


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_request_that_kills_only_late_is_failed_with_the_tokens_it_had(in_flight: int) -> None:
    world = crowd(max_steps_in_flight=in_flight)
    killer = RequestId(3)
    until(world, lambda: len(world.tokens.get(killer, [])) >= 4)
    world.killers.add(killer)
    run_to_the_end(world)
    assert world.failed() == [killer]
    assert len(world.tokens[killer]) >= 4
    assert world.num_lives <= 1 + 4


def test_two_killers_are_failed_one_after_the_other_and_nobody_with_them() -> None:
    world = crowd(max_steps_in_flight=2)
    world.submit([90] * 9, max_tokens=2)
    world.killers |= {RequestId(2), RequestId(4)}
    run_to_the_end(world)
    assert sorted(world.failed()) == [2, 4]
    assert world.num_lives <= 1 + 2 + 2 * 2, "two deaths in company, and two of each alone"


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_chance_death_while_a_suspect_is_alone_does_not_make_it_the_culprit(in_flight: int) -> None:
    world = crowd(max_steps_in_flight=in_flight)
    for _ in range(2):
        world.plan()
        world.relive()
    unlucky = max(world.suspects())
    while (step := world.plan()) is None or list(world.rows(step)) != [unlucky]:
        world.finish()
    world.relive()
    assert world.deaths[unlucky] == 3
    step = world.plan()
    assert step is not None
    assert list(world.rows(step)) == [unlucky], "the one that was struck is heard first in the new life"
    run_to_the_end(world)
    assert not world.failed()


def test_a_culprit_that_is_found_counts_as_progress() -> None:
    world = crowd()
    world.killers.add(RequestId(2))
    run_to_the_end(world)
    assert world.found_culprits == [False] * 3 + [True]


def test_a_killer_that_leaves_is_nobodys_fault() -> None:
    world = crowd(max_steps_in_flight=2)
    world.killers.add(RequestId(1))
    until(world, lambda: RequestId(1) in world.suspects())
    until(world, lambda: bool(world.in_flight) or world.plan() is not None)
    world.abort(RequestId(1))
    run_to_the_end(world)
    assert not world.failed()
    assert world.num_lives <= 1 + 3


def test_a_suspect_that_is_aborted_makes_room_for_the_next_at_once() -> None:
    world = crowd()
    for _ in range(2):
        world.plan()
        world.relive()
    first, second, *_ = world.suspects()
    assert set(world.rows(world.plan())) == {first}  # type: ignore[arg-type]
    world.abort(first)
    assert world.plan() is None or world.core.config.max_steps_in_flight > 1
    world.finish()
    assert set(world.rows(world.plan())) == {second}  # type: ignore[arg-type]
    run_to_the_end(world)


def test_new_requests_wait_only_for_the_steps_in_which_a_suspect_is_alone() -> None:
    world = crowd(max_steps_in_flight=2)
    for _ in range(2):
        world.plan()
        world.relive()
    late = world.submit([70] * 3, max_tokens=2)
    num_suspects = len(world.suspects())
    first = len(world.steps)
    until(world, lambda: late in world.tokens)
    assert len(world.steps) - first <= 2 * num_suspects + 2
    run_to_the_end(world)


def test_those_that_had_no_part_in_the_deaths_run_together_beside_the_suspects_turns() -> None:
    world = LossyWorld(max_num_seqs=2, max_steps_in_flight=2)
    first = world.submit([1] * 5, max_tokens=9)
    second = world.submit([2] * 5, max_tokens=9)
    others = [world.submit([3 + number] * 5, max_tokens=3) for number in range(3)]
    for _ in range(2):
        world.plan()
        world.relive()
    assert world.suspects() == [first, second]
    run_to_the_end(world)
    assert all(world.reason(request) == "length" for request in others)
    assert not world.failed()


def test_a_suspect_that_is_paused_holds_nobody_up_and_runs_alone_when_it_resumes() -> None:
    world = LossyWorld(credit_window=2, max_steps_in_flight=2)
    slow = world.submit([1] * 5, max_tokens=6)
    until(world, lambda: len(world.tokens.get(slow, [])) == 1)
    for _ in range(2):
        assert world.plan() is not None or world.in_flight
        world.relive()
    assert world.suspects() == [slow]
    seq = world.sequence(slow)
    assert seq is not None
    seq.credit_length = len(seq.log)  # its window is smaller than what it has already
    quick = world.submit([2] * 5, max_tokens=2)
    until(world, lambda: quick in world.ends)
    assert world.paused() == [slow]
    world.grant(slow, 100)
    run_to_the_end(world)
    assert not world.failed()


def test_suspects_are_taken_in_the_order_of_their_classes_and_others_run_between_their_turns() -> None:
    world = LossyWorld()

    class ByPriority:
        def priority_class(self, admit: object) -> int:
            return admit.priority  # type: ignore[attr-defined, no-any-return]

        def admits_beside(self, num_running: int) -> bool:
            return True

    world.core.policy = world.core.gate.policy = ByPriority()
    low = world.submit([1] * 5, max_tokens=4, priority=5)
    high = world.submit([2] * 5, max_tokens=4, priority=1)
    for _ in range(2):
        world.plan()
        world.relive()
    assert set(world.suspects()) == {low, high}
    newest = world.submit([3] * 5, max_tokens=4, priority=0)
    order: list[RequestId] = []
    while world.core.num_live:
        step = world.plan()
        if step is not None:
            order += [request for request in world.rows(step) if request not in order]
        if world.in_flight:
            world.finish()
    assert order == [high, newest, low]
    world.check_outputs()
