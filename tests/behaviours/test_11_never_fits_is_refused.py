"""11. What can never be served is refused at once with the numbers; what grows to the pool's end ends there."""

from __future__ import annotations

import pytest

from repertory import NeverFitsError
from repertory.tests.engine.stage import answer_of, greedy, prompt_of

CAPACITY = 40


@pytest.fixture
def small_pool(stage):
    """An engine whose pool holds less than one sequence of the model's length."""
    return lambda **settings: stage(block_size=4, num_device_blocks=CAPACITY // 4, max_model_len=128, **settings)


async def test_a_prompt_over_the_pool_is_refused_with_the_numbers_and_the_next_one_served(small_pool):
    s = await small_pool()
    with pytest.raises(NeverFitsError, match=r"60 tokens.*61.*40 tokens") as caught:
        await s.ask(prompt_of(60))
    assert caught.value.http_status == 400
    assert caught.value.field == "prompt"
    assert answer_of(await s.ask(prompt_of(5, 1))) == s.alone(prompt_of(5, 1))
    await s.check_clean()


async def test_the_refusal_does_not_wait_for_what_runs_and_does_not_disturb_it(small_pool):
    s = await small_pool()
    s.gate.shut()
    running = s.engine.generate(prompt_of(8), greedy(12))
    await s.gate.arrival()
    with pytest.raises(NeverFitsError):
        await s.ask(prompt_of(60, 1))
    short = s.begin(prompt_of(5, 2))
    s.gate.open()
    assert answer_of(await short) == s.alone(prompt_of(5, 2))
    assert answer_of([output async for output in running][-1]) == s.alone(prompt_of(8), greedy(12))
    await s.check_clean()


@pytest.mark.parametrize("max_tokens", [None, 100])
@pytest.mark.parametrize("length", [5, 36, 39])
async def test_a_request_that_grows_to_the_capacity_ends_there_with_length(small_pool, length, max_tokens):
    s = await small_pool()
    output = await s.ask(prompt_of(length), greedy(max_tokens))
    assert answer_of(output) == s.alone(prompt_of(length), greedy(CAPACITY - length))
    await s.check_clean()


async def test_the_whole_pool_is_the_limit_to_the_token(small_pool):
    s = await small_pool()
    with pytest.raises(NeverFitsError):
        await s.ask(prompt_of(CAPACITY))
    assert len((await s.ask(prompt_of(CAPACITY - 1), greedy(None))).outputs[0].token_ids) == 1
    await s.check_clean()


async def test_several_that_want_the_whole_pool_end_one_after_the_other(small_pool):
    s = await small_pool()
    outputs = await s.ask_all([(prompt_of(5, seed), greedy(None)) for seed in range(3)])
    assert [answer_of(output) for output in outputs] == [s.alone(prompt_of(5, seed), greedy(35)) for seed in range(3)]
    await s.check_clean()


async def test_the_engine_says_at_its_start_that_the_pool_is_smaller_than_a_sequence(small_pool, stage, log_lines):
    await small_pool()
    (warning,) = [line for line in log_lines if line["event"] == "engine.warning"]
    assert (warning["num_tokens"], warning["max_model_len"]) == (CAPACITY, 128)
    del log_lines[:]
    await stage(block_size=4, num_device_blocks=32, max_model_len=128)
    assert not [line for line in log_lines if line["event"] == "engine.warning"]
