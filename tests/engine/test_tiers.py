"""A prefix that has left a real device's memory is brought back from the host's, and gives the same tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from repertory import Engine, SamplingParams

PREFIX = [(7 * i) % 300 + 3 for i in range(1024)]
OTHER = [(11 * i) % 300 + 3 for i in range(1100)]


async def answer(engine: Engine, prompt: list[int], num_tokens: int = 8) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, output_kind="final_only")
    [output] = [output async for output in engine.generate(prompt, params)]
    return output.outputs[0].token_ids


def open_engine(model: Path, **settings: Any) -> Engine:
    sizes = {"dtype": "float32", "num_threads": 1, "block_size": 16, "num_device_blocks": 80, "max_num_batched_tokens": 2048}
    return Engine(model=str(model), device="cpu", log_level="error", **{**sizes, "worker": "inline", **settings})


async def quiet(engine: Engine) -> None:
    """Wait for the end of all copies."""
    core = engine._company.scheduler.core
    async with asyncio.timeout(60):
        while core.num_copies:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)


async def leave_on_host(engine: Engine, num_blocks: int) -> None:
    """The prefix's first `num_blocks` are on the host only, and nothing else is anywhere."""
    cache = engine._company.scheduler.core.cache
    engine._company.scheduler.core.pressure.write_back = lambda *facts: None  # type: ignore[method-assign]
    await answer(engine, PREFIX)
    await answer(engine, [9])  # a step takes the copy along
    await quiet(engine)
    cache.write_back(num_blocks)
    await answer(engine, [8])
    await quiet(engine)
    cache.tree.evict(cache.tree.num_evictable)


@pytest.mark.parametrize("worker", ["inline", "process"])
@pytest.mark.parametrize("num_blocks", [64, 40])
async def test_a_prefix_costs_only_what_the_host_does_not_hold(tiny_model: Path, worker: str, num_blocks: int) -> None:
    async with open_engine(tiny_model, num_host_blocks=0) as engine:
        expected = await answer(engine, [*PREFIX, 5, 6])
    async with open_engine(tiny_model, num_host_blocks=100, preemption_mode="swap", worker=worker) as engine:
        await leave_on_host(engine, num_blocks)
        before = await engine.stats()
        assert await answer(engine, [*PREFIX, 5, 6]) == expected
        after = await engine.stats()
        assert after.num_computed_tokens - before.num_computed_tokens == 1024 - 16 * num_blocks + 2 + 7
        assert after.prefix_cache_hits - before.prefix_cache_hits == 16 * num_blocks
        assert after.swap_in_bytes > 0
        await quiet(engine)
        assert await engine.audit() == []


async def test_four_that_want_the_same_prefix_at_once_are_brought_it_by_one_copy(tiny_model: Path) -> None:
    prompts = [[*PREFIX[:512], last] for last in (4, 5, 6, 7)]
    async with open_engine(tiny_model, num_host_blocks=0) as engine:
        expected = [await answer(engine, prompt) for prompt in prompts]
    async with open_engine(tiny_model, num_host_blocks=100, preemption_mode="swap") as engine:
        await leave_on_host(engine, 64)
        assert await asyncio.gather(*(answer(engine, prompt) for prompt in prompts)) == expected
        stats = await engine.stats()
        assert stats.swap_in_bytes == stats.swap_out_bytes // 2, "half of the prefix, once"
        await quiet(engine)
        assert await engine.audit() == []


async def test_a_host_pool_that_changes_hands_all_the_time_gives_the_same_tokens(tiny_model: Path) -> None:
    prompts = [PREFIX[start : start + 200] for start in range(0, 800, 50)] + [OTHER[:700]]
    async with open_engine(tiny_model, num_host_blocks=0, num_device_blocks=300) as engine:
        expected = [await answer(engine, prompt, 24) for prompt in prompts]
    sizes = {"num_device_blocks": 48, "num_host_blocks": 30}
    async with open_engine(tiny_model, preemption_mode="swap", **sizes) as engine:
        for _ in range(2):
            assert await asyncio.gather(*(answer(engine, prompt, 24) for prompt in prompts)) == expected
        stats = await engine.stats()
        assert stats.swap_out_bytes > 0
        await quiet(engine)
        assert await engine.audit() == []
        await engine.reset_prefix_cache()
        stats = await engine.stats()
        assert stats.device_blocks.free == stats.device_blocks.total
        assert stats.host_blocks.free == stats.host_blocks.total
