"""1. A prompt that is in the cache as a whole still computes its last token, and what others read stays as it is."""

from __future__ import annotations

import pytest

from repertory.tests.engine.stage import answer_of, greedy, prompt_of

LENGTHS = [3, 4, 5, 7, 8, 9, 11, 12, 13]
THREE_MORE = [77, 78, 79]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_a_prompt_served_again_hits_all_but_its_last_token_and_answers_alike(stage, length, steps_in_flight):
    s = await stage(block_size=4, max_steps_in_flight=steps_in_flight)
    prompt = prompt_of(length)
    first = await s.ask(prompt)
    second = await s.ask(prompt)
    third = await s.ask(prompt + THREE_MORE)
    assert answer_of(first) == answer_of(second) == s.alone(prompt)
    assert answer_of(third) == s.alone(prompt + THREE_MORE)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens <= length - 1
    assert second.num_cached_tokens >= (length - 1) // 4 * 4
    assert third.num_cached_tokens >= length // 4 * 4
    await s.check_clean()


@pytest.mark.parametrize("length", LENGTHS)
async def test_no_row_is_empty_and_a_full_hit_computes_one_prompt_position(stage, length):
    s = await stage(block_size=4)
    prompt = prompt_of(length)
    await s.ask(prompt)
    num_steps = len(s.device.steps)
    second = await s.ask(prompt)
    rows = [row for _, step in s.device.steps[num_steps:] for row in step]
    assert all(count >= 1 for _, _, count in rows)
    _, start, count = rows[0]
    assert start == second.num_cached_tokens
    assert start + count == length
    await s.check_clean()


@pytest.mark.parametrize("length", [4, 8, 12])
async def test_recomputing_the_last_position_leaves_the_block_of_a_running_holder_as_it_is(stage, length):
    # The simulated memory raises if the second writes to what the first one reads, or if either reads anything else.
    s = await stage(block_size=4)
    prompt, long = prompt_of(length), greedy(40)
    stream = s.engine.generate(prompt, long)
    await anext(stream)
    others = await s.ask_all([(prompt, greedy(9))] * 3)
    assert {tuple(other.outputs[0].token_ids) for other in others} == {tuple(s.alone(prompt, greedy(9)).token_ids)}
    async for output in stream:
        first = output
    assert answer_of(first) == s.alone(prompt, long)
    await s.check_clean()


async def test_with_the_cache_off_nothing_is_found_and_nothing_stays(stage):
    s = await stage(block_size=4, enable_prefix_caching=False)
    for _ in range(3):
        output = await s.ask(prompt_of(12))
        assert answer_of(output) == s.alone(prompt_of(12))
        assert output.num_cached_tokens == 0
        assert await s.engine.audit() == []
        blocks = (await s.engine.stats()).device_blocks
        assert blocks.free == blocks.total
    together = await s.ask_all([(prompt_of(12), greedy(9))] * 3)
    assert [output.num_cached_tokens for output in together] == [0, 0, 0]
    assert [answer_of(output) for output in together] == [s.alone(prompt_of(12), greedy(9))] * 3
    await s.check_clean()
