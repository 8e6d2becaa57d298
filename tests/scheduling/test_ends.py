"""How requests end: by length, by a stop id, by their client, or by logits that are no numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from repertory.protocol.ids import Epoch, RequestId
from repertory.protocol.messages import StepDone
from repertory.protocol.sampling import SamplingParams
from repertory.radix.tokens import TokenLog

from .world import World

GREEDY = SamplingParams(temperature=0.0)
PROMPT = list(range(20, 33))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_no_row_is_planned_past_a_requests_last_token(in_flight: int) -> None:
    world = World(max_steps_in_flight=in_flight)
    request = world.submit(PROMPT, max_tokens=5)
    assert world.run() == 5
    assert world.reason(request) == "length"
    assert world.device.num_computed_tokens == len(PROMPT) + 4
    world.check_outputs()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_stop_id_ends_the_request_and_the_surplus_token_is_dropped(in_flight: int) -> None:
    world = World(max_steps_in_flight=in_flight)
    tokens = world.device.reference(PROMPT, GREEDY, 10)
    request = world.submit(PROMPT, max_tokens=10, stop_token_ids=[tokens[4]])
    world.run()
    place = tokens.index(tokens[4])
    assert world.tokens[request] == tokens[: place + 1]
    assert world.reason(request) == "stop"
    world.check_nothing_is_left()


def test_only_a_stop_id_the_client_gave_is_named_in_the_end() -> None:
    world = World()
    token = world.device.reference(PROMPT, GREEDY, 1)[0]
    request = world.submit(PROMPT, stop_token_ids=[token])  # as the model's own end comes in
    world.run()
    assert world.ends[request].stop_token_id is None


# ---- aborts -------------------------------------------------------------------------------------


def _at_once(world: World) -> None:
    return


def _between_chunks(world: World) -> None:
    world.step()


def _in_flight(world: World) -> None:
    world.plan()


def _two_in_flight(world: World) -> None:
    world.plan()
    world.plan()


def _last_chunk_in_flight(world: World) -> None:
    while not any(step.samples[-1] for step in world.in_flight):
        world.plan() or world.finish()


def _decoding(world: World) -> None:
    while not world.tokens:
        world.step()


STATES: list[Callable[[World], None]] = [
    _at_once,
    _between_chunks,
    _in_flight,
    _two_in_flight,
    _last_chunk_in_flight,
    _decoding,
]


@pytest.mark.parametrize("reach", STATES)
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_an_abort_in_any_state_ends_once_and_disturbs_nobody(
    reach: Callable[[World], None], in_flight: int, caching: bool
) -> None:
    world = World(blocks=12, max_num_batched_tokens=4, max_steps_in_flight=in_flight, enable_prefix_caching=caching)
    gone = world.submit(PROMPT, max_tokens=10)
    other = world.submit([*PROMPT[:9], 1, 2, 3], max_tokens=6)
    reach(world)
    world.abort(gone)
    world.abort(gone)
    assert world.reason(gone) == "abort"
    assert world.sequence(gone) is None
    world.run(other)
    world.check_outputs()
    world.check_nothing_is_left()


def test_an_abort_of_a_waiting_request_ends_it() -> None:
    world = World(max_num_seqs=1)
    world.submit([1])
    waiting = world.submit([2])
    world.step()
    world.abort(waiting)
    assert world.waiting() == []
    world.run()
    assert world.reason(waiting) == "abort"


@pytest.mark.parametrize("in_flight", [1, 2])
def test_an_abort_of_a_preempted_request_ends_it(in_flight: int) -> None:
    world = World(blocks=4, max_steps_in_flight=in_flight)
    world.without_reserve()
    first, second = world.submit([1] * 4, max_tokens=12), world.submit([2] * 4, max_tokens=12)
    while not world.preempted():
        world.plan() or world.finish()
    world.abort(second)  # with two steps in flight its last token is still to come
    world.run(first)
    world.check_outputs()
    world.check_nothing_is_left()


def test_aborts_of_unknown_and_ended_requests_are_no_operation() -> None:
    world = World()
    request = world.submit([1], max_tokens=1)
    world.abort(RequestId(77))
    world.run()
    world.abort(request)
    assert world.reason(request) == "length"


def test_an_answer_of_another_epoch_is_dropped() -> None:
    world = World()
    world.submit([1], max_tokens=1)
    step = world.plan()
    assert step is not None
    world.core.on_step_done(StepDone(Epoch(2), step.step_id, step.seq_ids, [5], 0.0), 0.0)
    assert world.core.num_in_flight == 1
    world.run()
    world.check_outputs()


# ---- rows that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_request_whose_logits_are_not_finite_fails_alone(in_flight: int) -> None:
    world = World(max_steps_in_flight=in_flight)
    requests = [world.submit([number] * 6, max_tokens=8) for number in range(3)]
    world.step()
    world.poisoned.add(requests[1])
    world.run()
    assert [world.reason(request) for request in requests] == ["length", "error", "length"]
    problem = world.ends[requests[1]].problem
    assert problem is not None
    assert problem.kind == "RequestFailedError"
    world.check_outputs()
    world.check_nothing_is_left()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_what_a_failing_step_wrote_is_not_offered_for_reuse(in_flight: int) -> None:
    world = World(max_steps_in_flight=in_flight)
    failing = world.submit(PROMPT)
    world.poisoned.add(failing)
    world.run()
    again = world.submit(PROMPT)
    world.run()
    assert world.opens[again].num_cached_tokens == 0
    world.check_outputs()


def test_what_was_proven_before_the_failure_stays_cached() -> None:
    world = World()
    world.submit(PROMPT, max_tokens=1)
    world.run()
    failing = world.submit(PROMPT)
    world.poisoned.add(failing)
    world.run()
    again = world.submit(PROMPT)
    world.run()
    assert world.opens[again].num_cached_tokens == 12


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("budget", [4, 6, 16, 512])
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_those_who_shared_what_failed_are_rolled_back_and_give_what_they_give_alone(
    failing: int, budget: int, in_flight: int
) -> None:
    world = World(max_num_batched_tokens=budget, max_steps_in_flight=in_flight)
    for own in range(3):
        world.submit([*PROMPT, 50 + own], max_tokens=6, seed=own)
    world.poisoned.add(RequestId(failing))
    world.run()
    assert [world.reason(RequestId(number)) for number in (1, 2, 3)].count("error") == 1
    world.check_outputs()
    world.check_nothing_is_left()


def test_all_tokens_in_flight_of_one_who_is_rolled_back_are_dropped_not_only_the_failing_steps() -> None:
    world = World(max_steps_in_flight=2)
    failing, other = (world.submit(own, max_tokens=6) for own in ([*PROMPT, 1], [*PROMPT, 2]))
    world.poisoned.add(failing)
    world.plan()
    world.plan()  # both decode here already, upon the blocks that fail
    world.finish()
    assert world.reason(failing) == "error"
    assert world.preempted() == [other]
    world.finish()
    assert other not in world.tokens
    world.run()
    world.check_outputs()


def test_a_failure_that_comes_with_the_failure_of_what_it_shared_is_tried_again() -> None:
    world = World()
    first, second = world.submit([*PROMPT, 1], max_tokens=3), world.submit([*PROMPT, 2], max_tokens=3)
    world.poisoned |= {first, second}
    world.step()
    assert set(world.ends) == {first}, "the second read what the first spoilt"
    world.poisoned.clear()
    world.run()
    assert world.reason(second) == "length"
    world.check_outputs()


def test_a_request_that_fails_after_it_was_preempted_takes_its_blocks_out_of_the_cache() -> None:
    # The second request's only row is in flight, and fails, when the first one takes its blocks.
    world = World(blocks=4, max_steps_in_flight=2)
    world.without_reserve()
    world.submit([1] * 4, max_tokens=12)
    while world.core.queues.running == [] or world.core.queues.running[0].num_computed < 7:
        world.plan() or world.finish()
    second = world.submit([2] * 8, max_tokens=4)
    world.poisoned.add(second)
    while second not in world.ends:
        if world.plan() is None:
            world.finish()
    assert world.ends[second].num_preemptions == 1, "else this tests nothing"
    world.poisoned.clear()
    assert world.core.cache.lookup(None, TokenLog([2] * 8 + [0])) == 0
    world.run()
    world.check_outputs()
    world.check_nothing_is_left()


def test_a_foreseen_end_frees_its_slot_for_the_very_next_step() -> None:
    world = World(blocks=64, block_size=4, max_num_seqs=1, max_steps_in_flight=2)
    first = world.submit(PROMPT[:4], max_tokens=3)
    second = world.submit(PROMPT[4:8], max_tokens=1)
    steps = []
    while not {first, second} <= set(world.ends):
        while (step := world.plan()) is not None:
            steps.append(list(step.seq_ids))
        world.finish()
    world.run()
    assert steps[:4] == [[1], [1], [1], [2]], "the second is in the step after the first one's last"
    world.check_outputs()
