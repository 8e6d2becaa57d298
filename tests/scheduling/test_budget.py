"""How a step's tokens are given out: decodes first, then prefills, half of the rest to the first of them."""

from __future__ import annotations

import random

import pytest

from repertory.protocol.ids import RequestId

from .world import World


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens; another seed, another beginning."""
    rng = random.Random(seed)
    return [seed % 1000, *(rng.randrange(1000) for _ in range(length - 1))]


def planned(world: World) -> dict[RequestId, int]:
    """Tokens by request of the next step."""
    step = world.step()
    assert step is not None
    return {request: count for request, (_, count) in world.rows(step).items()}


def test_half_goes_to_the_first_prefill_and_half_to_the_shortest_other() -> None:
    world = World(max_num_batched_tokens=20)
    long, medium, short = (world.submit(prompt(length, length)) for length in (100, 60, 30))
    assert planned(world) == {long: 10, short: 10}
    assert planned(world) == {long: 10, short: 10}
    assert planned(world) == {long: 10, short: 10}
    assert planned(world) == {short: 1, long: 9, medium: 10}, "19 are left beside the decode, and the odd one is the others'"


def test_the_odd_token_goes_to_the_first_in_alternate_steps() -> None:
    world = World(max_num_batched_tokens=7)
    first, second = world.submit(prompt(50, 1)), world.submit(prompt(50, 2))
    assert [planned(world) for _ in range(4)] == [{first: 4, second: 3}, {first: 3, second: 4}] * 2


def test_a_budget_of_one_token_alternates_between_the_first_and_the_others() -> None:
    world = World(max_num_batched_tokens=1)
    first, second = world.submit(prompt(50, 1)), world.submit(prompt(50, 2))
    assert [planned(world) for _ in range(4)] == [{first: 1}, {second: 1}] * 2


def test_what_the_others_cannot_use_goes_to_the_first() -> None:
    world = World(max_num_batched_tokens=40)
    long, short = world.submit(prompt(100, 1)), world.submit(prompt(5, 2))
    assert planned(world) == {long: 35, short: 5}


def test_what_the_first_cannot_use_goes_to_the_others() -> None:
    world = World(max_num_batched_tokens=40)
    short, long, middle = world.submit(prompt(5, 1)), world.submit(prompt(100, 2)), world.submit(prompt(20, 3))
    assert planned(world) == {short: 5, middle: 20, long: 15}


def test_a_prefill_alone_has_the_whole_budget() -> None:
    world = World(max_num_batched_tokens=7)
    only = world.submit(prompt(50))
    assert [planned(world) for _ in range(3)] == [{only: 7}] * 3


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_prefills_take_part_than_are_allowed(most: int) -> None:
    world = World(max_num_batched_tokens=64, max_prefill_batch_size=most)
    requests = [world.submit(prompt(20, seed)) for seed in range(5)]
    assert planned(world) == dict.fromkeys(requests[:most], 20)
    world.run()
    world.check_outputs()


def test_one_prefill_a_step_and_one_token_a_step_still_let_all_of_them_on() -> None:
    world = World(max_num_batched_tokens=1, max_prefill_batch_size=1)
    for seed in range(3):
        world.submit(prompt(10, seed), max_tokens=2)
    assert world.run() <= 3 * (10 + 2)
    world.check_outputs()


@pytest.mark.parametrize("budget", [1, 8, 64, 512])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_eight_decodes_get_a_token_in_every_step_while_a_long_prompt_is_computed(budget: int, in_flight: int) -> None:
    world = World(blocks=2500, block_size=16, max_num_batched_tokens=budget, max_steps_in_flight=in_flight)
    decodes = [world.submit(prompt(4, seed), max_tokens=1000) for seed in range(8)]
    while any(request not in world.tokens for request in decodes):
        world.step()
    long = world.submit(prompt(4096 if budget > 8 else 600, 99), max_tokens=1)
    num_steps = 0
    while long not in world.ends:
        step = world.step()
        assert step is not None
        rows = world.rows(step)
        assert all(rows[request][1] == 1 for request in decodes)
        assert rows.get(long, (0, 0))[1] <= max(1, budget - 8)
        num_steps += 1
    length = len(world.admits[long].token_ids)
    assert num_steps <= -(-length // max(1, budget - 8)) + in_flight
    assert world.tokens[long] == world.reference(long)


@pytest.mark.parametrize(("budget", "most_steps"), [(64, 1), (16, 2), (2, 22), (1, 22)])
@pytest.mark.parametrize("length", [640, 6400])
def test_a_short_prompt_does_not_wait_for_the_long_one_before_it(budget: int, most_steps: int, length: int) -> None:
    world = World(blocks=2000, max_num_batched_tokens=budget, max_num_seqs=8)
    decode = world.submit(prompt(1, 1), max_tokens=1000)
    world.step()
    long = world.submit(prompt(length, 2))
    for _ in range(5):
        world.step()
    short = world.submit(prompt(10, 3))
    for _ in range(most_steps):
        step = world.step()
        assert step is not None and decode in world.rows(step)
    assert short in world.tokens
    assert long not in world.tokens or (budget == 64 and length == 640)


@pytest.mark.parametrize("budget", [1, 3, 16])
def test_a_flow_of_short_prompts_neither_waits_for_the_long_one_nor_starves_it(budget: int) -> None:
    world = World(blocks=4000, max_num_batched_tokens=budget, max_num_seqs=8)
    decodes = [world.submit(prompt(1, seed), max_tokens=1000) for seed in range(4)]  # more rows than a small budget
    while any(request not in world.tokens for request in decodes):
        world.step()
    long = world.submit(prompt(200, 99), max_tokens=1)
    waits: list[int] = []
    while long not in world.tokens:
        assert sum(waits) < 3 * 200, "the long prompt starves"
        short = world.submit(prompt(10, 100 + len(waits)), max_tokens=1)
        waits.append(world.run(short))
    assert max(waits) <= 2 * 10 + 1
    for request in decodes:
        world.abort(request)
    world.check_outputs()


def test_without_chunks_a_prompt_over_the_budget_runs_whole_and_as_the_only_prefill() -> None:
    world = World(max_num_batched_tokens=16, enable_chunked_prefill=False)
    decode = world.submit(prompt(4, 1), max_tokens=50)
    world.step()
    long, short = world.submit(prompt(40, 2)), world.submit(prompt(4, 3))
    assert planned(world) == {decode: 1, long: 40}
    assert planned(world) == {decode: 1, long: 1, short: 4}


def test_without_chunks_prompts_run_whole_while_they_fit_the_budget_together() -> None:
    world = World(max_num_batched_tokens=20, enable_chunked_prefill=False)
    first, second, third, fourth = (world.submit(prompt(length, length)) for length in (8, 9, 10, 3))
    assert planned(world) == {first: 8, second: 9}, "the third does not fit, and nobody passes it"
    assert planned(world) == {first: 1, second: 1, third: 10, fourth: 3}


def test_without_chunks_decodes_leave_a_prompt_at_least_a_place() -> None:
    world = World(max_num_batched_tokens=2, enable_chunked_prefill=False)
    decodes = [world.submit(prompt(1, seed), max_tokens=50) for seed in range(4)]
    while any(request not in world.tokens for request in decodes):
        world.step()
    late = world.submit(prompt(30, 9))
    assert planned(world) == {**dict.fromkeys(decodes, 1), late: 30}
