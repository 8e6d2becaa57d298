"""2. Prompt logprobs are complete and right although the prompt is cached, and say nothing about the cache's hits."""

from __future__ import annotations

import pytest

from repertory.tests.engine.stage import greedy, last_of, prompt_of

PROMPT = prompt_of(10)


async def _ask(engine, prompt, **params):
    return await last_of(engine.generate(prompt, greedy(4, ignore_eos=True, **params)))


def _close(found, expected):
    assert found[0] is None and expected[0] is None
    assert len(found) == len(expected)
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert list(one) == list(other)
        for token_id, logprob in one.items():
            assert logprob.logprob == pytest.approx(other[token_id].logprob, abs=1e-4)
            assert (logprob.rank, logprob.decoded_token) == (other[token_id].rank, other[token_id].decoded_token)


@pytest.mark.parametrize("backend", ["torch", "auto"])
async def test_a_cached_prompt_has_those_of_a_run_without_the_cache(real, check_clean, backend):
    engine = await real(attention_backend=backend)
    without = await real(attention_backend=backend, enable_prefix_caching=False)
    await _ask(engine, PROMPT)
    for count in (1, 3, 1, 0):
        found = await _ask(engine, PROMPT, prompt_logprobs=count)
        expected = await _ask(without, PROMPT, prompt_logprobs=count)
        assert len(found.prompt_logprobs) == 10
        assert all(count <= len(entry) <= count + 1 for entry in found.prompt_logprobs[1:])
        _close(found.prompt_logprobs, expected.prompt_logprobs)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    await check_clean(engine)


async def test_the_order_of_requests_does_not_matter(real, check_clean):
    others = [prompt_of(10, 1), PROMPT[:6], PROMPT + prompt_of(5, 2), PROMPT[:5] + prompt_of(8, 3)]
    found = []
    for order in (others, others[::-1], []):
        engine = await real()
        for prompt in order:
            await _ask(engine, prompt, prompt_logprobs=2)
        found.append((await _ask(engine, PROMPT, prompt_logprobs=2)).prompt_logprobs)
        for prompt in order:
            assert len((await _ask(engine, prompt, prompt_logprobs=2)).prompt_logprobs) == len(prompt)
        await check_clean(engine)
    for one in found[1:]:
        _close(one, found[0])


async def test_what_was_not_looked_up_is_no_hit_and_no_miss(stage):
    s = await stage(block_size=4)
    await s.ask(PROMPT)
    before = await s.engine.stats()
    asked = await s.ask(PROMPT, greedy(prompt_logprobs=3))
    after = await s.engine.stats()
    assert asked.num_cached_tokens == 0
    assert (after.prefix_cache_queries, after.prefix_cache_hits) == (before.prefix_cache_queries, before.prefix_cache_hits)
    assert (await s.ask(PROMPT)).num_cached_tokens == 9, "it left the cache as it was"
    await s.check_clean()


async def test_what_it_computed_is_cache_for_others(stage):
    s = await stage(block_size=4)
    await s.ask(PROMPT, greedy(prompt_logprobs=0))
    assert (await s.ask(PROMPT)).num_cached_tokens == 9
    await s.check_clean()
