"""5. What is cached under one salt does not exist under another, and does under its own."""

from __future__ import annotations

import pytest

from repertory import ValidationError
from repertory.tests.engine.stage import answer_of, greedy, prompt_of

PROMPT = prompt_of(12)


async def test_a_prompt_hits_within_its_salt_and_not_across(stage):
    s = await stage(block_size=4)
    outputs = [await s.ask(PROMPT, cache_salt=salt) for salt in ("s1", "s2", None, "s1", "s2", None)]
    assert [output.num_cached_tokens > 0 for output in outputs] == [False, False, False, True, True, True]
    assert {output.num_cached_tokens for output in outputs[3:]} == {11}, "all but the token that must be computed"
    assert {tuple(output.outputs[0].token_ids) for output in outputs} == {tuple(s.alone(PROMPT).token_ids)}
    assert all(answer_of(output) == s.alone(PROMPT) for output in outputs)
    await s.check_clean()


async def test_a_miss_across_salts_computes_as_much_as_an_empty_cache(stage):
    s = await stage(block_size=4)
    computed = []
    for salt in ("s1", "s2", None):
        before = s.device.num_computed_tokens
        await s.ask(PROMPT, cache_salt=salt)
        computed.append(s.device.num_computed_tokens - before)
    assert len(set(computed)) == 1
    assert (await s.engine.stats()).prefix_cache_hits == 0
    await s.check_clean()


async def test_the_salt_goes_for_every_block_of_the_chain(stage):
    s = await stage(block_size=4)
    await s.ask(PROMPT, cache_salt="s1")
    for shared in (4, 8, 12):
        other = await s.ask(PROMPT[:shared] + prompt_of(5, shared), cache_salt=f"other {shared}")
        assert other.num_cached_tokens == 0
        own = await s.ask(PROMPT[:shared] + prompt_of(6, shared), cache_salt="s1")
        assert own.num_cached_tokens >= shared
    await s.check_clean()


async def test_requests_with_different_salts_side_by_side_share_nothing(stage):
    s = await stage(block_size=4)
    streams = [s.engine.generate(PROMPT, greedy(), cache_salt=salt) for salt in ("s1", "s2", "s1", None)]
    outputs = [[output async for output in stream][-1] for stream in streams]
    assert all(answer_of(output) == s.alone(PROMPT) for output in outputs)
    assert outputs[0].num_cached_tokens == outputs[1].num_cached_tokens == outputs[3].num_cached_tokens == 0
    await s.check_clean()


async def test_salts_leave_nothing_behind(stage):
    s = await stage(block_size=4, num_device_blocks=16)
    for number in range(40):
        assert (await s.ask(PROMPT, cache_salt=f"tenant {number}")).num_cached_tokens == 0
    await s.check_clean()


@pytest.mark.parametrize("salt", ["", 5, b"s1", ["s1"], True, "x" * 10_000])
async def test_a_salt_that_is_no_short_text_is_refused(stage, salt):
    s = await stage()
    with pytest.raises(ValidationError, match="cache_salt") as caught:
        await s.ask(PROMPT, cache_salt=salt)
    assert caught.value.field == "cache_salt"
    assert answer_of(await s.ask(PROMPT, cache_salt="x")) == s.alone(PROMPT)
    await s.check_clean()
