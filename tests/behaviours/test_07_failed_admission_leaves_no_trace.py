"""7. A request that does not fit yet holds nothing, moves nothing, and is counted once, when it comes in."""

from __future__ import annotations

import asyncio

import pytest

from repertory.tests.engine.stage import answer_of, greedy, last_of, prompt_of

STEM = prompt_of(4)
NEEDS_FIVE = STEM + prompt_of(15, 1)
RUNNING = prompt_of(10, 2)
SIX_TOKENS = greedy(6)
"""16 tokens in the end: four blocks."""


async def crowded(stage, steps_in_flight):
    """One block cached, one request running towards four, one waiting that needs five, of which the cached is the first."""
    s = await stage(block_size=4, num_device_blocks=6, max_steps_in_flight=steps_in_flight)
    await s.ask(STEM, greedy(1))
    s.gate.shut()
    running = s.begin(RUNNING, SIX_TOKENS)
    step = await s.gate.arrival()
    waiting = s.engine.generate(NEEDS_FIVE, greedy(1), "waiting")
    while not (await s.engine.stats()).num_waiting:  # noqa: ASYNC110 - until the tokenizer is through
        await asyncio.sleep(0)
    return s, running, waiting, step


async def check_no_trace(s, queries):
    stats = await s.engine.stats()
    blocks = stats.device_blocks
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert blocks.cached == 1, "the cached block stays evictable"
    assert blocks.referenced <= 4, "only what runs holds blocks"
    assert blocks.free + blocks.cached + blocks.referenced == blocks.total == 6
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == queries
    assert await s.engine.audit() == []


@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_attempts_that_fail_leave_no_trace_until_space_appears(stage, steps_in_flight):
    s, running, waiting, step = await crowded(stage, steps_in_flight)
    before = await s.engine.stats()
    queries = before.prefix_cache_queries, before.prefix_cache_hits
    num_attempts = 0
    while len(step.seq_ids) == 1 and step.seq_ids[0] == 2:
        if not running.done() and (await s.engine.stats()).num_running:
            await check_no_trace(s, queries)
            num_attempts += 1
        s.gate.let_through()
        step = await s.gate.arrival()
    assert num_attempts >= 4
    s.gate.open()
    output = await last_of(waiting)
    assert answer_of(await running) == s.alone(RUNNING, SIX_TOKENS)
    assert answer_of(output) == s.alone(NEEDS_FIVE, greedy(1))
    assert output.num_cached_tokens == 4
    after = await s.engine.stats()
    assert after.prefix_cache_queries == queries[0] + len(NEEDS_FIVE), "counted once, however often it was tried"
    assert after.prefix_cache_hits == queries[1] + 4
    await s.check_clean()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_a_request_aborted_while_it_does_not_fit_leaves_no_trace(stage, steps_in_flight):
    s, running, waiting, _ = await crowded(stage, steps_in_flight)
    before = await s.engine.stats()
    for _ in range(2):
        s.gate.let_through()
        await s.gate.arrival()
    await s.engine.abort("waiting")
    output = await last_of(waiting)
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids, output.num_cached_tokens) == ("abort", [], 0)
    s.gate.open()
    assert answer_of(await running) == s.alone(RUNNING, SIX_TOKENS)
    after = await s.engine.stats()
    assert (after.prefix_cache_queries, after.prefix_cache_hits) == (before.prefix_cache_queries, before.prefix_cache_hits)
    await s.check_clean()


async def test_the_cached_block_that_a_waiting_request_would_use_may_be_evicted_by_a_running_one(stage):
    s = await stage(block_size=4, num_device_blocks=5)
    await s.ask(STEM, greedy(1))
    long = greedy(10)  # 20 tokens: all five blocks
    running = s.begin(RUNNING, long)
    await asyncio.sleep(0)
    waiting = await s.ask(NEEDS_FIVE, greedy(1))
    assert answer_of(await running) == s.alone(RUNNING, long)
    assert answer_of(waiting) == s.alone(NEEDS_FIVE, greedy(1))
    await s.check_clean()
