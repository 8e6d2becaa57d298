"""3. A cached prefix is granted on equal tokens, never on an equal key."""

from __future__ import annotations

import pytest

from repertory.radix.tree import PrefixTree
from repertory.tests.engine.stage import answer_of, greedy, prompt_of


@pytest.fixture(params=[True, False], ids=["all keys collide", "keys as they are"])
def collides(request, monkeypatch):
    """Whether every block has the same key in its parent."""
    if request.param:
        monkeypatch.setattr(PrefixTree, "key", staticmethod(lambda first_block: 0))
    return request.param


@pytest.mark.parametrize("length", [4, 8, 12, 13])
async def test_prompts_that_differ_from_the_first_token_on_share_nothing(stage, collides, length):
    s = await stage(block_size=4)
    for seed in range(4):
        output = await s.ask(prompt_of(length, seed))
        assert output.num_cached_tokens == 0
        assert answer_of(output) == s.alone(prompt_of(length, seed))
    assert (await s.engine.stats()).prefix_cache_hits == 0
    await s.check_clean()


async def test_equal_prompts_hit_in_spite_of_other_blocks_with_the_same_key(stage, collides):
    s = await stage(block_size=4)
    prompts = [prompt_of(13, seed) for seed in range(3)]
    for prompt in prompts * 2:
        output = await s.ask(prompt)
        assert answer_of(output) == s.alone(prompt)
    assert output.num_cached_tokens == 12
    await s.check_clean()


async def test_a_block_is_not_found_after_another_prefix(stage, collides):
    s = await stage(block_size=4)
    tail = prompt_of(8, 50)
    await s.ask(prompt_of(4, 1) + tail)
    output = await s.ask(prompt_of(4, 2) + tail)
    assert output.num_cached_tokens == 0
    assert answer_of(output) == s.alone(prompt_of(4, 2) + tail)
    alone = await s.ask(tail)
    assert alone.num_cached_tokens == 0
    assert answer_of(alone) == s.alone(tail)
    await s.check_clean()


@pytest.mark.parametrize("filled", [1, 2, 3])
async def test_a_partly_filled_block_is_never_matched_as_if_full(stage, collides, filled):
    s = await stage(block_size=4)
    stem = prompt_of(8 + filled)
    # One token: the output's KV is never computed, so the last block stays partly filled.
    await s.ask(stem, greedy(1))
    other = stem + prompt_of(9, 60)
    output = await s.ask(other)
    assert output.num_cached_tokens <= len(stem)
    assert answer_of(output) == s.alone(other)
    await s.check_clean()
