"""A request with `n` is n sequences: admitted together, each with its own stream, credit and end, one account of them all."""

from __future__ import annotations

import dataclasses

import pytest

from repertory.actors.scheduling.reports import Finished, Paused
from repertory.protocol.ids import Epoch, RequestId
from repertory.protocol.messages import ALL_SEQUENCES, Closed, Credit, DeviceLost, DeviceReady, Resend, RunStep, TokensSampled

from .world import World

PROMPT = list(range(100, 114))
"""Three blocks of four tokens, and two tokens more."""


class Restless(World):
    """Rows may sit out here: readers are slow and suspects run alone. The device may die."""

    num_lives = 1

    def plan(self) -> RunStep | None:
        """Plan one step; it is in flight then."""
        step = self.core.plan(self.now)
        if step is not None:
            self.in_flight.append(step)
        self._look()
        return step

    def relive(self) -> None:
        """The device dies with every step in flight, and another takes over."""
        self.num_lives += 1
        self.in_flight.clear()
        self.core.on_device_lost(DeviceLost(self.core.epoch, "the test ends it"), self.now)
        self.device = dataclasses.replace(self.device, epoch=None)
        self.core.on_device_ready(DeviceReady(Epoch(self.num_lives)))
        self._look()


def told(world: World, request: RequestId) -> TokensSampled:
    """What the core repeats of a request."""
    world.core.on_resend(Resend(request), world.now)
    [message] = world.core.take_outputs(world.now)
    assert isinstance(message, TokensSampled)
    return message


# ---- what they give -------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
def test_each_sequence_has_the_random_stream_of_its_index(in_flight: int) -> None:
    world = World(max_steps_in_flight=in_flight)
    request = world.submit(PROMPT, n=5, max_tokens=9, seed=7)
    world.run()
    world.check_outputs()
    given = [world.given[request, index] for index in range(5)]
    assert len({tuple(tokens) for tokens in given}) == 5
    world.check_nothing_is_left()


def test_greedy_sequences_are_equal() -> None:
    world = World()
    request = world.submit(PROMPT, n=3, max_tokens=6)
    world.run()
    assert world.given[request, 0] == world.given[request, 1] == world.given[request, 2]


@pytest.mark.parametrize("budget", [1, 3, 5, 14, 64, 512])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 5, 12, 13, 14, 15, 16])
def test_the_prompt_is_computed_once_and_every_other_sequence_computes_its_last_token(
    length: int, in_flight: int, budget: int
) -> None:
    world = World(max_num_batched_tokens=budget, max_steps_in_flight=in_flight)
    world.submit(list(range(length)), n=4, max_tokens=9)
    world.run()
    world.check_outputs()
    assert world.core.num_computed_tokens == length + 3 + 4 * 8
    world.check_nothing_is_left()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_it_is_computed_once_in_whole_prefills_too(in_flight: int) -> None:
    world = World(enable_chunked_prefill=False, max_num_batched_tokens=8, max_steps_in_flight=in_flight)
    world.submit(PROMPT, n=4, max_tokens=9)
    world.run()
    assert world.core.num_computed_tokens == len(PROMPT) + 3 + 4 * 8


def test_a_prompt_that_is_cached_to_its_last_token_makes_nobody_wait() -> None:
    world = World()
    world.submit(PROMPT[:13], max_tokens=1)
    world.run()
    request = world.submit(PROMPT[:13], n=4, max_tokens=1)
    assert world.run(request) == 1


def test_without_prefix_caching_each_computes_its_own_prompt() -> None:
    world = World(enable_prefix_caching=False)
    world.submit(PROMPT, n=3, max_tokens=5, seed=1)
    world.run()
    world.check_outputs()
    assert world.core.num_computed_tokens == 3 * (len(PROMPT) + 4)


def test_more_sequences_than_may_run_take_turns() -> None:
    world = World(max_num_seqs=2)
    request = world.submit(PROMPT, n=5, max_tokens=4, seed=3)
    other = world.submit(PROMPT[::-1], max_tokens=4)
    world.run()
    world.check_outputs()
    order = [end.request_id for end in (*world.sequence_ends.values(),)]
    assert order == [request] * 5 + [other], "sequences of a request are neighbours in the order"
    world.check_nothing_is_left()


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("blocks", [5, 6, 8, 11])
def test_they_preempt_each_other_under_pressure_and_give_the_same(blocks: int, in_flight: int) -> None:
    world = World(blocks=blocks, max_steps_in_flight=in_flight)
    world.without_reserve()
    request = world.submit(PROMPT[:6], n=4, max_tokens=14, seed=11)
    world.run()
    world.check_outputs()
    assert world.ends[request].num_preemptions > 0
    assert world.ends[request].num_preemptions == sum(world.core.stats().num_preemptions.values())
    world.check_nothing_is_left()


# ---- one admission --------------------------------------------------------------------------------


def test_the_queue_counts_requests_and_refuses_one_whole() -> None:
    world = World(max_num_seqs=1, max_num_queued=2)
    for _ in range(3):
        world.submit(PROMPT, n=4)
    refused = world.submit(PROMPT, n=4)
    problem = world.refusals[refused]
    assert problem is not None and problem.kind == "QueueFullError"
    world.run()
    assert world.core.num_live == 0


def test_the_prompt_counts_once_in_all_numbers() -> None:
    world = World()
    first = world.submit(PROMPT, n=4, max_tokens=3)
    world.run()
    stats = world.core.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (len(PROMPT), 0)
    second = world.submit(PROMPT, n=2, max_tokens=3)
    world.run()
    stats = world.core.stats()
    assert (world.opens[first].num_cached_tokens, world.opens[second].num_cached_tokens) == (0, 13)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (2 * len(PROMPT), 13)
    [account, _] = [report for report in world.reports if isinstance(report, Finished)]
    assert (account.num_sequences, account.num_prompt_tokens, account.num_output_tokens) == (4, 14, 12)


# ---- ends -----------------------------------------------------------------------------------------


def test_one_that_a_stop_string_ends_leaves_the_others_running() -> None:
    world = World()
    request = world.submit(PROMPT, n=3, max_tokens=20, seed=2)
    for _ in range(6):
        world.step()
    world.stop(request, 1)
    world.stop(request, 1)
    assert request not in world.ends
    assert world.core.num_live == 1
    world.run()
    world.check_outputs()
    assert [len(world.given[request, index]) for index in (0, 2)] == [20, 20]
    assert len(world.given[request, 1]) < 20
    assert [world.sequence_ends[request, index].finish_reason for index in range(3)] == ["length", "stop", "length"]
    assert len([report for report in world.reports if isinstance(report, Finished)]) == 1
    world.check_nothing_is_left()


@pytest.mark.parametrize("index", [3, 128])
def test_a_stop_of_a_sequence_that_is_not_there_is_a_no_op(index: int) -> None:
    world = World()
    request = world.submit(PROMPT, n=3)
    world.step()
    world.stop(request, index)
    world.core.on_credit(Credit(request, 5, index))
    world.run()
    world.check_outputs()


def test_each_sequence_ends_at_its_own_stop_token() -> None:
    world = World(vocab_size=12)
    request = world.submit([1, 2, 3], n=4, max_tokens=40, seed=5, stop_token_ids=[7])
    world.run()
    world.check_outputs()
    lengths = {len(world.given[request, index]) for index in range(4)}
    assert len(lengths) > 1
    world.check_nothing_is_left()


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("in_flight", [1, 2])
def test_an_abort_ends_all_that_have_not_ended_with_one_message(num_steps: int, in_flight: int) -> None:
    world = World(max_steps_in_flight=in_flight, max_num_seqs=2, max_num_batched_tokens=6)
    request = world.submit(PROMPT, n=3, max_tokens=50, seed=2)
    other = world.submit(PROMPT, max_tokens=5)
    for _ in range(num_steps):
        world.step()
    world.abort(request)
    world.abort(request)
    assert world.ends[request].index == ALL_SEQUENCES
    assert world.reason(request) == "abort"
    assert not [seq for seq in world.core.queues.waiting if seq.request_id == request]
    world.run()
    assert world.reason(other) == "length"
    world.check_outputs()
    world.check_nothing_is_left()


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("num_steps", range(5))
def test_a_row_that_is_not_finite_ends_its_whole_request_and_no_other(num_steps: int, in_flight: int) -> None:
    world = World(max_steps_in_flight=in_flight, max_num_batched_tokens=6)
    bad = world.submit(PROMPT, n=3, max_tokens=9, seed=1)
    good = world.submit([*PROMPT, 1, 2, 3], n=2, max_tokens=9, seed=1)
    for _ in range(num_steps):
        world.step()
    world.poisoned.add(bad)
    world.run()
    assert world.reason(bad) == "error"
    assert world.reason(good) == "length"
    again = world.submit(PROMPT, n=2, max_tokens=9, seed=1)
    world.run()
    assert world.reason(again) == "length"
    world.check_outputs()
    world.check_nothing_is_left()


# ---- slow readers ---------------------------------------------------------------------------------


def test_credit_is_each_sequences_own() -> None:
    world = Restless(credit_window=3)
    request = world.submit(PROMPT, n=3, max_tokens=9, seed=4)
    for _ in range(20):
        world.step()
    assert [len(world.given[request, index]) for index in range(3)] == [3, 3, 3]
    assert len([report for report in world.reports if isinstance(report, Paused)]) == 3
    world.core.on_credit(Credit(request, 2, 1))
    for _ in range(20):
        world.step()
    assert [len(world.given[request, index]) for index in range(3)] == [3, 5, 3]
    for index in range(3):
        world.core.on_credit(Credit(request, 50, index))
    world.run()
    world.check_outputs()
    world.check_nothing_is_left()


def test_a_reader_that_takes_nothing_ends_the_whole_request() -> None:
    world = Restless(credit_window=3, max_pause_s=5.0)
    request = world.submit(PROMPT, n=3, max_tokens=9, seed=4)
    for _ in range(20):
        world.step()
    world.core.on_credit(Credit(request, 50, 2))
    world.run()
    assert world.reason(request) == "error"
    assert world.sequence_ends[request, 2].finish_reason == "length"
    problem = world.ends[request].problem
    assert problem is not None and problem.kind == "ReaderTooSlowError"
    world.check_nothing_is_left()


# ---- what is said again ---------------------------------------------------------------------------


def test_all_sequences_are_repeated_with_the_ends_of_those_that_have_ended() -> None:
    world = World()
    request = world.submit(PROMPT, n=3, max_tokens=8, seed=2)
    for _ in range(5):
        world.step()
    world.stop(request, 1)
    world.step()
    message = told(world, request)
    assert message.opened == [world.opens[request]]
    for index in range(3):
        repeated = [token for place, token in zip(message.indices, message.token_ids, strict=True) if place == index]
        assert repeated == world.given[request, index]
    assert [(end.index, end.finish_reason) for end in message.ended] == [(1, "stop")]
    world.run()
    message = told(world, request)
    assert len(message.token_ids) == sum(len(world.given[request, index]) for index in range(3))
    assert sorted((end.index, end.finish_reason) for end in message.ended) == [(0, "length"), (1, "stop"), (2, "length")]
    world.core.on_closed(Closed([request]))
    world.core.on_resend(Resend(request), world.now)
    assert world.core.take_outputs(world.now) == []


def test_a_request_aborted_after_some_sequences_ended_is_repeated_with_both_ends() -> None:
    world = World()
    request = world.submit(PROMPT, n=3, max_tokens=8, seed=2)
    for _ in range(5):
        world.step()
    world.stop(request, 2)
    world.abort(request)
    assert [(end.index, end.finish_reason) for end in told(world, request).ended] == [(2, "stop"), (ALL_SEQUENCES, "abort")]


# ---- the device dies ------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_deaths_of_the_device_change_no_output(every: int, in_flight: int) -> None:
    world = Restless(max_steps_in_flight=in_flight, max_num_batched_tokens=7)
    world.submit(PROMPT, n=3, max_tokens=6, seed=9)
    world.submit(PROMPT[:5], n=2, max_tokens=6, seed=9)
    for _ in range(10):
        for _ in range(every):
            world.step()
        world.relive()
    while world.core.num_live:
        world.step()
    world.check_outputs()
    world.check_nothing_is_left()
    assert all(end.finish_reason == "length" for end in world.ends.values())


def test_a_request_that_kills_the_device_is_failed_whole() -> None:
    world = Restless()
    killer = world.submit(PROMPT, n=3, max_tokens=6, seed=9)
    other = world.submit(PROMPT[:5], n=2, max_tokens=6, seed=9)
    while world.core.num_live:
        step = world.plan()
        killers = {seq.seq_id for seq in world.core.queues.running if seq.request_id == killer}
        if step is not None and killers & set(step.seq_ids):
            world.relive()
        elif world.in_flight:
            world.finish()
    assert world.reason(killer) == "error"
    assert world.reason(other) == "length"
    assert world.num_lives <= 1 + 4
    world.check_outputs()
