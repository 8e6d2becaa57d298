"""A beam search among other work: it takes its turn, leaves nothing behind, and finds what it finds alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from repertory import BeamSearchParams, EngineDrainingError, RequestFailedError, UnsupportedError
from repertory.tests.engine.stage import PATIENCE_S, greedy, prompt_of, until


async def test_a_search_that_is_cancelled_leaves_nothing(stage: Any) -> None:
    s = await stage(block_size=4)
    beside = s.begin(prompt_of(9, 1), greedy(60))
    for num_steps in (1, 5, 20):
        search = asyncio.ensure_future(s.engine.beam_search(prompt_of(9), BeamSearchParams(3, max_tokens=1000)))
        before = len(s.device.steps)
        await until(lambda before=before, num_steps=num_steps: len(s.device.steps) >= before + num_steps)  # type: ignore[misc]
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search
        await until(lambda: s.engine._company.scheduler.core.num_live <= 1)
    assert (await beside).outputs[0].token_ids == s.alone(prompt_of(9, 1), greedy(60)).token_ids
    await s.check_clean()


async def test_searches_and_requests_side_by_side_find_what_they_find_alone(stage: Any) -> None:
    s = await stage(block_size=4, num_device_blocks=40, max_num_seqs=6, max_num_batched_tokens=16)
    s.admit_carelessly()
    params = BeamSearchParams(3, max_tokens=25)
    searches = [(await s.engine.beam_search(prompt_of(9, seed), params)).sequences for seed in range(3)]
    tasks = [asyncio.ensure_future(s.engine.beam_search(prompt_of(9, seed), params)) for seed in range(3)]
    others = [s.begin(prompt_of(9, seed), greedy(20)) for seed in range(5)]
    async with asyncio.timeout(PATIENCE_S):
        assert [output.sequences for output in await asyncio.gather(*tasks)] == searches
    for seed, other in enumerate(others):
        assert (await other).outputs[0].token_ids == s.alone(prompt_of(9, seed), greedy(20)).token_ids
    await s.check_clean()


async def test_it_ends_with_the_error_of_a_beam_that_fails(stage: Any) -> None:
    s = await stage(block_size=4)
    s.device.fail_rows = lambda step: step.seq_ids[:1] if step.step_id > 6 else []
    with pytest.raises(RequestFailedError, match="not finite"):
        await s.engine.beam_search(prompt_of(9), BeamSearchParams(3, max_tokens=100))
    await s.check_clean()


async def test_a_draining_engine_finishes_a_search_and_takes_no_other(stage: Any) -> None:
    s = await stage(block_size=4)
    params = BeamSearchParams(3, max_tokens=40)
    expected = await s.engine.beam_search(prompt_of(9), params)
    search = asyncio.ensure_future(s.engine.beam_search(prompt_of(9), params))
    before = len(s.device.steps)
    await until(lambda: len(s.device.steps) > before + 5)
    s.engine._company.scheduler.core.draining = True
    with pytest.raises(EngineDrainingError):
        await s.engine.beam_search(prompt_of(5), params)
    assert await search == expected
    await s.check_clean()


async def test_it_has_one_line_in_the_log(stage: Any, log_lines: list[dict[str, Any]]) -> None:
    s = await stage(block_size=4)
    await s.engine.beam_search(prompt_of(9), BeamSearchParams(3, max_tokens=20))
    lines = [line for line in log_lines if line["event"].startswith("request.")]
    assert [(line["event"], line["num_sequences"], line["num_output_tokens"]) for line in lines] == [
        ("request.finished", 3, 60)
    ]
    await s.check_clean()


async def test_a_policy_that_admits_nobody_beside_a_running_one_is_refused_by_name(stage: Any) -> None:
    s = await stage(block_size=4, scheduling_policy="static")
    with pytest.raises(UnsupportedError, match="static"):
        await s.engine.beam_search(prompt_of(9), BeamSearchParams(3))
    await s.check_clean()


async def test_without_prefix_caching_it_finds_the_same(stage: Any) -> None:
    params = BeamSearchParams(3, max_tokens=12)
    found = []
    for caching in (True, False):
        s = await stage(block_size=4, enable_prefix_caching=caching)
        found.append(await s.engine.beam_search(prompt_of(9), params))
        await s.check_clean()
    assert found[0] == found[1]
