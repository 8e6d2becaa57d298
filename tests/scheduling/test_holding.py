"""A request that holds keeps its KV after its last token for those that follow it, and is in nobody's way."""

from __future__ import annotations

import pytest

from repertory.actors.scheduling.reports import Finished
from repertory.protocol.ids import RequestId

from .lossy import LossyWorld, turn

PROMPT = list(range(100, 114))


def settle(world: LossyWorld) -> None:
    """Turn until nothing can be done without a message."""
    while True:
        turn(world)
        if not world.in_flight and world.plan() is None:
            return


def step_of_a_search(world: LossyWorld, parents: list[tuple[RequestId, list[int]]]) -> list[tuple[RequestId, list[int]]]:
    """Let two requests follow each parent, end the parents, and return what follows with its prompt."""
    children = [
        (world.submit([*prompt, 500 + branch], max_tokens=1, holds=True, follows=parent), [*prompt, 500 + branch])
        for parent, prompt in parents
        for branch in range(2)
    ]
    settle(world)
    for parent, _ in parents:
        world.abort(parent)
    return children


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 14, 15, 16])
def test_each_that_follows_computes_one_token(length: int, in_flight: int) -> None:
    world = LossyWorld(max_steps_in_flight=in_flight)
    prompt = PROMPT[:length] if length <= 14 else [*PROMPT, *range(length - 14)]
    level = [(world.submit(prompt, max_tokens=1, holds=True), prompt)]
    settle(world)
    assert world.core.num_computed_tokens == length
    for _ in range(5):
        num_parents, before = len(level), world.core.num_computed_tokens
        level = step_of_a_search(world, level)
        assert world.core.num_computed_tokens - before == 2 * num_parents
        level = level[:: max(1, len(level) // 4)]
        keep = {request for request, _ in level}
        for request in [r for r in world.admits if r not in keep and r not in world.ends]:
            world.abort(request)
    for request, _ in level:
        world.abort(request)
    world.check_outputs()
    world.check_nothing_is_left()
    assert not [report for report in world.reports if isinstance(report, Finished)], "no account of parts"


def test_one_that_holds_takes_no_slot_and_is_told_of_by_nobody() -> None:
    world = LossyWorld(max_num_seqs=1)
    held = world.submit(PROMPT, max_tokens=1, holds=True)
    settle(world)
    other = world.submit([1, 2, 3], max_tokens=3)
    settle(world)
    assert world.reason(other) == "length"
    assert held not in world.ends
    assert world.core.stats().num_running == 0
    world.abort(held)
    world.check_nothing_is_left()


def test_held_blocks_go_first_when_a_candidate_lacks_some_and_those_that_follow_compute_more() -> None:
    world = LossyWorld(blocks=6)
    held = world.submit(PROMPT, max_tokens=1, holds=True)
    settle(world)
    big = world.submit([9] * 22, max_tokens=2)
    settle(world)
    assert world.reason(big) == "length"
    assert world.paused() == [held]
    follower = world.submit([*PROMPT, 5], max_tokens=2, follows=held)
    settle(world)
    assert world.reason(follower) == "length"
    world.abort(held)
    world.check_outputs()
    world.check_nothing_is_left()


def test_a_pool_full_of_held_blocks_does_not_stop_those_that_follow() -> None:
    world = LossyWorld(blocks=4)
    level = [(world.submit(PROMPT[:10], max_tokens=1, holds=True), PROMPT[:10])]
    for _ in range(4):
        settle(world)
        level = step_of_a_search(world, level)[:2]
        keep = {request for request, _ in level}
        for request in [r for r in world.admits if r not in keep and r not in world.ends]:
            world.abort(request)
    for request, _ in level:
        assert len(world.tokens[request]) == 1
        world.abort(request)
    world.check_outputs()
    world.check_nothing_is_left()


def test_a_held_request_that_is_preempted_is_not_computed_again() -> None:
    world = LossyWorld(blocks=5)
    world.without_reserve()
    growing = world.submit([7] * 4, max_tokens=14)
    turn(world)
    held = world.submit(PROMPT[:6], max_tokens=1, holds=True)
    settle(world)
    assert world.reason(growing) == "length"
    assert world.paused() == [held]
    assert len(world.tokens[held]) == 1
    world.abort(held)
    world.check_nothing_is_left()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_what_follows_a_request_whose_device_died_computes_its_whole_prompt(in_flight: int) -> None:
    world = LossyWorld(max_steps_in_flight=in_flight)
    held = world.submit(PROMPT, max_tokens=1, holds=True)
    settle(world)
    world.relive()
    follower = world.submit([*PROMPT, 5], max_tokens=2, follows=held)
    settle(world)
    assert world.reason(follower) == "length"
    assert len(world.tokens[held]) == 1
    world.abort(held)
    world.check_outputs()
    world.check_nothing_is_left()


@pytest.mark.parametrize(("prompt", "salt"), [([*PROMPT[:-1], 1, 2], None), ([1], None), ([*PROMPT, 2], "other")])
def test_a_request_that_does_not_really_follow_takes_nothing(prompt: list[int], salt: str | None) -> None:
    world = LossyWorld()
    held = world.submit(PROMPT, max_tokens=1, holds=True)
    settle(world)
    before = world.core.num_computed_tokens
    stranger = world.submit(prompt, max_tokens=1, follows=held, cache_salt=salt)
    settle(world)
    assert world.reason(stranger) == "length"
    assert world.core.num_computed_tokens - before >= min(len(prompt), len(prompt) - 12)
    world.abort(held)
    world.check_outputs()
    world.check_nothing_is_left()


def test_following_nobody_is_being_an_ordinary_request() -> None:
    world = LossyWorld()
    request = world.submit(PROMPT, follows=RequestId(77))
    settle(world)
    assert world.reason(request) == "length"
    assert world.core.stats().prefix_cache_queries == len(PROMPT)


def test_what_follows_is_neither_new_nor_counted_as_waiting() -> None:
    world = LossyWorld(max_num_seqs=1, max_num_queued=1)
    held = world.submit(PROMPT, max_tokens=1, holds=True)
    settle(world)
    world.submit([1] * 3)  # the queue is full
    world.core.draining = True
    followers = [world.submit([*PROMPT, number], max_tokens=1, follows=held) for number in range(4)]
    assert not world.refusals
    settle(world)
    assert {world.reason(request) for request in followers} == {"length"}
    world.abort(held)
    world.check_outputs()
    world.check_nothing_is_left()
