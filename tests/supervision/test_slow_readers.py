"""A reader that stops reading holds up nobody but itself, takes no memory without bound, and goes on exactly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from repertory.tests.engine.stage import answer_of, greedy, last_of, prompt_of, until

pytestmark = pytest.mark.alone


def delivery_of(stage: Any, stream: Any) -> Any:
    return stage.engine._company.dispatcher._deliveries[stream._delivery.request_id]


@pytest.mark.parametrize("window", [1, 3, 64])
async def test_a_reader_that_stops_reading_holds_only_itself_and_goes_on_exactly(stage: Any, window: int) -> None:
    s = await stage(block_size=4, credit_window=window)
    core = s.engine._company.scheduler.core
    params = greedy(200, output_kind="delta")
    slow = s.engine.generate(prompt_of(9, 1), params)
    await until(lambda: len(core.queues.paused) == 1)
    assert len(delivery_of(s, slow).completions[0].token_ids) <= window
    assert answer_of(await s.ask(prompt_of(9, 2), greedy(100))) == s.alone(prompt_of(9, 2), greedy(100))
    stats = await s.engine.stats()
    assert (stats.num_paused, stats.num_running, stats.device_blocks.referenced) == (1, 0, 0)
    text, token_ids, most_behind = "", [], 0
    async for output in slow:
        text += output.outputs[0].text
        token_ids += output.outputs[0].token_ids
        most_behind = max(most_behind, len(output.outputs[0].token_ids))
    expected = s.alone(prompt_of(9, 1), greedy(200))
    assert (token_ids, text) == (expected.token_ids, expected.text)
    assert most_behind <= window
    await s.check_clean()


async def test_a_reader_that_pauses_after_every_item_never_finds_more_than_its_window(stage: Any) -> None:
    s = await stage(block_size=4, credit_window=4)
    stream = s.engine.generate(prompt_of(9, 1), greedy(40, output_kind="delta"))
    core = s.engine._company.scheduler.core
    got: list[int] = []
    async for output in stream:
        found = output.outputs[0].token_ids
        assert len(found) <= 4
        got += found
        if not output.finished:
            await until(lambda: bool(core.queues.paused) or not core.num_live)
    assert got == s.alone(prompt_of(9, 1), greedy(40)).token_ids
    await s.check_clean()


async def test_a_slow_reader_in_time_ends_with_an_error_and_what_came_stays(stage: Any, log_lines: list[dict]) -> None:
    s = await stage(block_size=4, credit_window=3, max_pause_s=0.05)
    stream = s.engine.generate(prompt_of(9, 1), greedy(40))
    core = s.engine._company.scheduler.core
    await until(lambda: bool(core.queues.paused))
    await until(lambda: not core.num_live)
    output = await last_of(stream)
    assert output.outputs[0].finish_reason == "error"
    assert "the reader took nothing for 0.05 s" in str(output.outputs[0].stop_reason)
    assert output.outputs[0].token_ids == s.alone(prompt_of(9, 1), greedy(3)).token_ids
    assert any(line["event"] == "scheduler.paused" for line in log_lines)
    assert any(line["event"] == "request.failed" and "max_pause_s" in line["reason"] for line in log_lines)
    await s.check_clean()


async def test_an_abandoned_slow_stream_is_gone_at_once(stage: Any) -> None:
    s = await stage(block_size=4, credit_window=2)
    stream = s.engine.generate(prompt_of(9, 1), greedy(40))
    core = s.engine._company.scheduler.core
    await until(lambda: bool(core.queues.paused))
    await stream.aclose()
    await until(lambda: not core.num_live)
    await s.check_clean()


async def test_credit_that_finds_the_schedulers_box_full_is_not_lost(stage: Any) -> None:
    s = await stage(block_size=4, credit_window=2)
    stream = s.engine.generate(prompt_of(9, 1), greedy(20))
    core, inbox = s.engine._company.scheduler.core, s.engine._company.scheduler.inbox
    await until(lambda: bool(core.queues.paused))
    really, refusals = inbox.post_nowait, iter([True, True, True])

    def full(message: Any) -> bool:
        return False if next(refusals, False) else really(message)

    inbox.post_nowait = full
    assert answer_of(await last_of(stream)) == s.alone(prompt_of(9, 1), greedy(20))
    assert next(refusals, None) is None
    await s.check_clean()


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final_only"])
async def test_sixty_readers_of_every_pace_get_their_own_tokens(stage: Any, kind: str) -> None:
    s = await stage(block_size=4, num_device_blocks=40, credit_window=3, max_num_seqs=8)
    requests = [(prompt_of(5 + number % 7, number), greedy(3 + number % 20, output_kind=kind)) for number in range(60)]

    async def read(number: int) -> tuple[list[int], str]:
        text, token_ids = "", []
        async for output in s.engine.generate(*requests[number]):
            completion = output.outputs[0]
            text = text + completion.text if kind == "delta" else completion.text
            token_ids = token_ids + completion.token_ids if kind == "delta" else completion.token_ids
            for _ in range(number % 5 * 20):
                await asyncio.sleep(0)
        return token_ids, text

    async with asyncio.timeout(30):
        got = await asyncio.gather(*map(read, range(60)))
    for (prompt, params), answer in zip(requests, got, strict=True):
        expected = s.alone(prompt, params)
        assert answer == (expected.token_ids, expected.text)
    await s.check_clean()
