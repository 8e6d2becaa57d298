"""24, over HTTP. Who closes the connection ends the work for it: streaming or not, several completions, queued or read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from repertory.tests.engine.stage import greedy, prompt_of, seeded, until

LONG = {"max_tokens": 2000, "ignore_eos": True, "temperature": 0.8, "seed": 1, "request_id": "gone"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_closes_its_connection_ends_all_its_sequences(
    served: Any, log_lines: list[dict[str, Any]], stream: bool, n: int, path: str
) -> None:
    s = await served(block_size=4)
    core = s.engine._company.scheduler.core
    bystander = s.stage.begin(prompt_of(9, 3), seeded(4, 60))
    async with s.connection() as client:
        asked = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"prompt": prompt_of(9)}
        client.post(path, {**asked, **LONG, "n": n, "stream": stream})
        await until(lambda: len([seq for seq in core.queues.running if seq.admit.label == "gone"]) == n)
        if stream:
            await client.event()
        client.hang_up()
    await until(lambda: not any(seq.admit.label == "gone" for seq in core.queues.running))
    num_steps = core.num_steps
    await until(bystander.done)
    rows = [seq_id for step_id, step in s.stage.device.steps if step_id > num_steps + 2 for seq_id, _, _ in step]
    assert len(set(rows)) <= 1, "two steps later only the bystander has rows"
    assert (await bystander).outputs[0].token_ids == s.stage.device.reference(prompt_of(9, 3), seeded(4, 60), 60)
    await s.check_clean()
    ends = [line for line in log_lines if line["event"] == "request.finished" and line["label"] == "gone"]
    assert [(line["finish_reason"], line["num_sequences"]) for line in ends] == [("abort", n)]
    assert [(line["label"], line["path"]) for line in log_lines if line["event"] == "http.disconnected"] == [("gone", path)]


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_one_that_waits_is_gone_too(served: Any, log_lines: list[dict[str, Any]], stream: bool, prompts: int) -> None:
    s = await served(block_size=4, max_num_seqs=1)
    s.stage.gate.shut()
    held = s.stage.begin(prompt_of(5), seeded(1, 3))
    await s.stage.gate.arrival()
    waiting = s.engine._company.scheduler.core.queues.waiting
    async with s.connection() as client:
        client.post("/v1/completions", {**LONG, "prompt": [prompt_of(9, seed) for seed in range(prompts)], "stream": stream})
        await until(lambda: len(waiting) == prompts)
        client.hang_up()
        await until(lambda: not waiting)
    s.stage.gate.open()
    await held
    await s.check_clean()
    assert [line["label"] for line in log_lines if line["event"] == "http.disconnected"] == ["gone"]


async def test_a_client_that_only_closes_its_side_is_gone_too(served: Any) -> None:
    s = await served(block_size=4)
    async with s.connection() as client:
        client.post("/v1/completions", {**LONG, "prompt": prompt_of(9), "stream": True})
        await client.event()
        client.writer.write_eof()
        await until(lambda: not s.num_answering)
    await s.check_clean()


@pytest.mark.parametrize("sent", [0, 5, 40])
async def test_a_body_that_breaks_off_is_no_request(served: Any, log_lines: list[dict[str, Any]], sent: int) -> None:
    s = await served(block_size=4)
    async with s.connection() as client:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 60\r\n\r\n"
        client.writer.write(head + b'{"prompt": "x"}'.ljust(60)[:sent])
        await until(lambda: s.num_answering == 1)
        client.hang_up()
    await s.check_clean()
    assert s.stage.device.steps == []
    assert [line["event"] for line in log_lines if line["event"].startswith("http")] == ["http.disconnected"]


async def test_hanging_up_in_the_middle_of_everything_leaves_nothing(served: Any) -> None:
    s = await served(block_size=4, num_device_blocks=32, max_num_seqs=4)

    async def come_and_go(number: int) -> None:
        async with s.connection() as client:
            body = {"prompt": prompt_of(5 + number % 7, number), "max_tokens": 50, "n": 1 + number % 3}
            client.post("/v1/completions", {**body, "stream": bool(number % 2)})
            for _ in range(number % 11):
                await asyncio.sleep(0)
            if number % 4 == 3:
                await client.line()
            client.hang_up()

    await asyncio.gather(*map(come_and_go, range(60)))
    answer = await s.complete(prompt_of(9), 6)
    assert answer.json()["choices"][0]["token_ids"] == s.stage.alone(prompt_of(9), greedy(6)).token_ids
    await s.check_clean()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_normal_end_leaves_nothing_in_the_frontend(
    served: Any, log_lines: list[dict[str, Any]], stream: bool, n: int
) -> None:
    s = await served(block_size=4)
    assert (await s.complete(prompt_of(9), 5, n=n, stream=stream)).status_code == 200
    await s.check_clean()
    assert len(s.engine._company.dispatcher) == 0
    assert not [line for line in log_lines if line["event"].startswith("http")]
