"""20. A seeded request draws the same tokens whoever runs beside it and whatever happens to it."""

from __future__ import annotations

import asyncio

import pytest

from repertory import SamplingParams
from repertory.tests.engine.stage import last_of, prompt_of, seeded

PROMPT = prompt_of(11)
SEEDED = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)


def neighbours(engine, count=3, **params):
    """Requests that run beside the one in question."""
    settings = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, **params}
    return [engine.generate(prompt_of(7 + number, number + 1), SamplingParams(**settings)) for number in range(count)]


async def tokens(stream):
    return (await last_of(stream)).outputs[0].token_ids


async def run(engine, *, before=(), after=()):
    """The request's tokens, with streams that were begun before it and requests that come after it."""
    others = [asyncio.ensure_future(last_of(stream)) for stream in before]
    stream = engine.generate(PROMPT, SEEDED)
    others += [asyncio.ensure_future(last_of(other)) for other in after]
    found = await tokens(stream)
    await asyncio.gather(*others)
    return found


@pytest.fixture
async def alone(real):
    """The tokens of the request on an engine of its own, without cache or chunks."""
    engine = await real(enable_prefix_caching=False, enable_chunked_prefill=False)
    found = await tokens(engine.generate(PROMPT, SEEDED))
    assert len(set(found)) > 4, "not greedy, and no repetition"
    return found


async def test_beside_unseeded_and_seeded_ones_and_in_any_place(real, check_clean, alone):
    engine = await real(enable_prefix_caching=False)
    assert await run(engine, before=neighbours(engine)) == alone, "after unseeded ones"
    assert await run(engine, before=neighbours(engine, seed=42)) == alone, "after some with the same seed"
    assert await run(engine, before=neighbours(engine, seed=7, count=1), after=neighbours(engine, temperature=0.0)) == alone
    await check_clean(engine)


async def test_with_a_prefix_hit(real, check_clean, alone):
    engine = await real()
    outputs = [await last_of(engine.generate(PROMPT, SEEDED)) for _ in range(3)]
    assert [output.outputs[0].token_ids for output in outputs] == [alone] * 3
    assert [output.num_cached_tokens for output in outputs] == [0, 10, 10]
    await check_clean(engine)


@pytest.mark.parametrize("chunk", [1, 4])
async def test_with_small_chunks(real, check_clean, alone, chunk):
    engine = await real(max_num_batched_tokens=chunk)
    assert await run(engine) == alone
    assert await run(engine, before=neighbours(engine, 2, max_tokens=8)) == alone
    await check_clean(engine)


async def test_preempted(real, check_clean, alone):
    # Ten blocks: the request's 27 tokens need seven, and the older one's 36 need nine.
    engine = await real(num_device_blocks=10, block_size=4)
    engine._company.scheduler.core.planner.reserve.blocks = lambda growth: 0
    older = engine.generate(prompt_of(12, 3), SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True))
    stream = engine.generate(PROMPT, SEEDED)
    other, output = await asyncio.gather(last_of(older), last_of(stream))
    assert output.metrics.num_preemptions >= 1
    assert output.outputs[0].token_ids == alone
    assert other.metrics.num_preemptions == 0
    await check_clean(engine)


async def test_a_seed_changes_nothing_for_others(real, check_clean):
    engine = await real(enable_prefix_caching=False)
    other = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
    first = await tokens(engine.generate(PROMPT, other))
    streams = [engine.generate(PROMPT, params) for params in (SEEDED, other, SEEDED)]
    assert (await asyncio.gather(*map(tokens, streams)))[1] == first
    await check_clean(engine)


async def test_unseeded_requests_differ_unless_the_server_has_a_seed(stage):
    unseeded = SamplingParams(temperature=1.0, max_tokens=8)
    found = {}
    for server_seed in (None, 11):
        for attempt in range(2):
            s = await stage(seed=server_seed)
            outputs = [await s.ask(prompt_of(5), unseeded) for _ in range(2)]
            found[server_seed, attempt] = [output.outputs[0].token_ids for output in outputs]
            await s.check_clean()
    assert found[None, 0] != found[None, 1]
    assert found[11, 0] == found[11, 1]
    assert found[11, 0][0] != found[11, 0][1], "each request has a stream of its own"
    assert found[None, 0][0] != found[None, 0][1]


async def test_a_draw_is_named_by_its_output_position(stage):
    s = await stage(block_size=4, num_device_blocks=24)
    s.admit_carelessly()
    requests = [(prompt_of(10), seeded(seed, 60)) for seed in range(8)]
    outputs = await s.ask_all(requests)
    assert [output.outputs[0].token_ids for output in outputs] == [s.alone(*request).token_ids for request in requests]
    await s.check_clean()


async def test_each_of_several_completions_has_a_stream_of_its_own_that_depends_on_nothing_else(real, check_clean):
    several = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True, n=3)
    engine = await real()
    alone = [one.token_ids for one in (await last_of(engine.generate(PROMPT, several))).outputs]
    assert len({tuple(token_ids) for token_ids in alone}) == 3
    assert alone[0] == await tokens(engine.generate(PROMPT, SEEDED)), "the first is what a single one draws"
    small = await real(num_device_blocks=12, max_num_batched_tokens=5)
    small._company.scheduler.core.planner.reserve.blocks = lambda growth: 0
    streams = [*neighbours(small, max_tokens=6), small.generate(PROMPT, several)]
    outputs = await asyncio.gather(*map(last_of, streams))
    assert [one.token_ids for one in outputs[-1].outputs] == alone
    assert outputs[-1].metrics.num_preemptions > 0
    await check_clean(engine)
    await check_clean(small)
