"""No token is computed twice: neither by two rows of a step, nor by two requests, nor by two rounds."""

from __future__ import annotations

import random

import pytest

from repertory.protocol.ids import RequestId

from .world import World

BLOCK = 16


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


def forked(stem: int, own: int, *, ways: int = 32) -> list[list[int]]:
    """Prompts with a common stem whose own parts differ from their first token on."""
    shared = tokens(stem, 0)
    return [[*shared, way, *tokens(own - 1, 1 + way)] for way in range(ways)]


def together(world: World, prompts: list[list[int]], **request: int) -> list[RequestId]:
    """Submit all at once and run them to their end."""
    requests = [world.submit(prompt, **request) for prompt in prompts]
    world.run()
    world.check_outputs()
    return requests


@pytest.mark.parametrize("budget", [7, 64, 507, 512, 4096])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_shared_prefix_is_computed_once_however_it_is_cut(budget: int, in_flight: int) -> None:
    world = World(blocks=400, block_size=BLOCK, max_num_batched_tokens=budget, max_steps_in_flight=in_flight)
    together(world, forked(1024, 32), max_tokens=1)
    assert world.device.num_computed_tokens == 1024 + 32 * 32


def test_a_shared_prefix_is_computed_once_in_whole_prefills_too() -> None:
    world = World(blocks=400, block_size=BLOCK, max_num_batched_tokens=512, enable_chunked_prefill=False)
    together(world, forked(1024, 32), max_tokens=1)
    assert world.device.num_computed_tokens == 1024 + 32 * 32


@pytest.mark.parametrize("budget", [7, 64, 507, 512])
@pytest.mark.parametrize("stem", [1000, 1023, 1025])
def test_of_a_prefix_that_ends_inside_a_block_only_the_rest_behind_the_last_boundary_may_be_computed_again(
    budget: int, stem: int
) -> None:
    world = World(blocks=400, block_size=BLOCK, max_num_batched_tokens=budget)
    together(world, forked(stem, 32), max_tokens=1)
    least = stem + 32 * 32
    assert least <= world.device.num_computed_tokens <= least + 31 * (stem % BLOCK)


def test_a_second_identical_round_computes_one_token_a_request() -> None:
    world = World(blocks=400, block_size=BLOCK)
    prompts = forked(1024, 32)
    first = together(world, prompts, max_tokens=1)
    before = world.device.num_computed_tokens
    second = together(world, prompts, max_tokens=1)
    assert world.device.num_computed_tokens - before == 32
    assert [world.tokens[request] for request in first] == [world.tokens[request] for request in second]
    assert all(world.opens[request].num_cached_tokens == 1024 + 32 - 1 for request in second)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 12, 13])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_full_prompt_hit_still_computes_its_last_token(length: int, in_flight: int) -> None:
    world = World(blocks=20, max_steps_in_flight=in_flight)
    prompt = tokens(length, 1)
    together(world, [prompt], max_tokens=5)
    before = world.device.num_computed_tokens
    again, longer = world.submit(prompt, max_tokens=1), world.submit([*prompt, 1, 2, 3], max_tokens=1)
    world.run()
    world.check_outputs()
    # The second request may take all but its last token; a part of a block that is not full is nobody's to take.
    assert world.opens[again].num_cached_tokens >= (length - 1) // 4 * 4
    assert world.opens[again].num_cached_tokens <= length - 1
    assert world.opens[longer].num_cached_tokens >= length // 4 * 4
    assert world.device.num_computed_tokens - before <= 4 + 4 + 3


@pytest.mark.parametrize(("budget", "prefilled"), [(4, 4 + 3 * 1), (512, 4 * 4)])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_identical_prompts_of_one_block_at_once_are_all_right(budget: int, prefilled: int, in_flight: int) -> None:
    # None may share the block, since each computes its last token: a copy of its beginning comes with a later step,
    # so a row waits for it only where the step has no tokens left for it.
    world = World(blocks=40, max_num_batched_tokens=budget, max_steps_in_flight=in_flight)
    for seed in (1, 1, 2, 3):
        world.submit(tokens(4, 1), max_tokens=6, seed=seed)
    world.run()
    world.check_outputs()
    assert prefilled + 4 * 5 <= world.device.num_computed_tokens <= 4 * 4 + 4 * 5
    if in_flight == 1:
        assert world.device.num_computed_tokens == prefilled + 4 * 5
    world.check_nothing_is_left()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_prompt_that_goes_on_from_an_answer_finds_the_answers_full_blocks(in_flight: int) -> None:
    world = World(blocks=40, max_steps_in_flight=in_flight)
    [first] = together(world, [tokens(6, 1)], max_tokens=15)
    history = world.admits[first].token_ids + world.tokens[first]
    [second] = together(world, [[*history, 1, 2]], max_tokens=1)
    # The answer's last token was never computed: 20 of the 21 tokens have KV, in five full blocks.
    assert world.opens[second].num_cached_tokens == 20


def test_salts_share_nothing_with_each_other_and_everything_with_themselves() -> None:
    world = World(blocks=40)
    prompt = tokens(12, 1)
    cached = []
    for salt in ("s1", "s2", None, "s1"):
        request = world.submit(prompt, cache_salt=salt)
        world.run()
        cached.append(world.opens[request].num_cached_tokens)
    assert cached == [0, 0, 0, 11]
    world.check_outputs()
    world.check_nothing_is_left()


def test_without_prefix_caching_nothing_is_shared_and_nothing_stays() -> None:
    world = World(blocks=200, enable_prefix_caching=False)
    together(world, [tokens(12, 1)] * 4, max_tokens=1)
    assert world.device.num_computed_tokens == 4 * 12
    stats = world.core.stats()
    assert stats.prefix_cache_hits == 0
    assert stats.device_blocks.free == stats.device_blocks.total


def test_a_reset_forgets_what_nobody_holds_and_disturbs_nobody() -> None:
    world = World(blocks=40)
    prompt = tokens(12, 1)
    together(world, [prompt])
    running = world.submit(prompt, max_tokens=10)
    world.step()
    world.reset()
    assert world.core.stats().device_blocks.cached == 0
    world.run(running)
    world.reset()
    [fresh] = together(world, [prompt])
    assert world.opens[fresh].num_cached_tokens == 0
