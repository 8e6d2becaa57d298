"""A client that does not read holds up only itself: its request pauses, and in the end its connection is broken off."""

from __future__ import annotations

from typing import Any

import pytest

from repertory.tests.engine.stage import greedy, prompt_of, until

ASKED = {"prompt": prompt_of(9, 1), "max_tokens": 3000, "temperature": 0, "stream": True, "return_token_ids": True}


async def test_a_client_that_stops_reading_pauses_its_request_and_goes_on_exactly(served: Any) -> None:
    s = await served(block_size=4, credit_window=64, num_device_blocks=1000)
    core = s.engine._company.scheduler.core
    async with s.connection() as client:
        client.post("/v1/completions", ASKED)
        choices = [(await client.event())["choices"][0]]
        await until(lambda: len(core.queues.paused) == 1)
        answer = await s.complete(prompt_of(9, 2), 100)
        assert answer.json()["choices"][0]["token_ids"] == s.stage.alone(prompt_of(9, 2), greedy(100)).token_ids
        stats = await s.engine.stats()
        assert (stats.num_paused, stats.num_running, stats.device_blocks.referenced) == (1, 0, 0)
        while (event := await client.event()) is not None:
            choices.append(event["choices"][0])
    expected = s.stage.alone(prompt_of(9, 1), greedy(3000))
    assert [token for choice in choices for token in choice["token_ids"]] == expected.token_ids
    assert "".join(choice["text"] for choice in choices) == expected.text
    await s.check_clean()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_never_reads_is_cut_off_with_a_logged_reason(
    served: Any, log_lines: list[dict[str, Any]], n: int
) -> None:
    s = await served(block_size=4, credit_window=64, max_pause_s=0.2, num_device_blocks=1000)
    async with s.connection() as client:
        client.post("/v1/completions", {**ASKED, "n": n, "request_id": "deaf"})
        await client.line()
        await until(lambda: not s.num_answering)
        assert b"[DONE]" not in await client.rest()
    await s.check_clean()
    [line] = [line for line in log_lines if line["event"] == "http.reader_stuck"]
    assert line["label"] == "deaf" and line["waited_s"] >= 0.2


async def test_a_client_that_hangs_up_while_its_socket_is_full_is_gone(served: Any, log_lines: list[dict[str, Any]]) -> None:
    s = await served(block_size=4, credit_window=64, num_device_blocks=1000)
    async with s.connection() as client:
        client.post("/v1/completions", {**ASKED, "request_id": "deaf"})
        await client.event()
        await until(lambda: len(s.engine._company.scheduler.core.queues.paused) == 1)
        client.hang_up()
        await until(lambda: not s.num_answering)
    await s.check_clean()
    assert [line["label"] for line in log_lines if line["event"] == "http.disconnected"] == ["deaf"]


async def test_a_whole_answer_is_not_paused_for_its_reader(served: Any) -> None:
    s = await served(block_size=4, credit_window=8, max_pause_s=0.2)
    answer = await s.complete(prompt_of(9), 200)
    assert answer.json()["choices"][0]["token_ids"] == s.stage.alone(prompt_of(9), greedy(200)).token_ids
    await s.check_clean()
