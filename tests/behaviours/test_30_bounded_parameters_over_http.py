"""30, over HTTP. A parameter, a body or a header out of bounds is refused at once, and others see nothing of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from repertory.tests.engine.stage import greedy, prompt_of
from repertory.tests.http.served import error_of

pytestmark = pytest.mark.alone

WRONG: list[dict[str, Any]] = [
    {"n": 10**6},
    {"n": 10**100},
    {"best_of": 10**6},
    {"logprobs": 320},
    {"logprobs": -1},
    {"prompt_logprobs": 320},
    {"prompt_logprobs": -1},
    {"max_tokens": 10**12},
    {"min_tokens": 10**12},
    {"stop": ["x"] * 100_000},
    {"stop": "x" * 2**20},
    {"stop_token_ids": [5] * 100_000},
    {"logit_bias": {str(number): 1.0 for number in range(100_000)}},
    {"logit_bias": {"5": 10**300}},
    {"allowed_token_ids": [5] * 100_000},
    {"bad_words": ["x"] * 100_000},
    {"bad_words": ["x" * 2**20]},
    {"top_k": -2},
    {"temperature": -0.1},
    {"temperature": 10**300},
    {"top_p": 1.5},
    {"min_p": 2.0},
    {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"repetition_penalty": 0},
    {"seed": 2**64},
    {"priority": 2**70},
    {"request_id": "x" * 65_536},
    {"guided_regex": "x" * 2**20},
    {"guided_choice": ["x"] * 100_000},
    {"structured_outputs": {"json": "x" * 2**20}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 2**20]}}}},
    {"response_format": {"type": "x" * 2**20}},
    {"model": "x" * 2**20},
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: next(iter(wrong)))
async def test_it_is_refused_within_a_second_before_anything_is_made(served: Any, wrong: dict[str, Any], path: str) -> None:
    s = await served(block_size=4)
    asked: dict[str, Any] = {"prompt": prompt_of(5)}
    (field,) = wrong
    if "chat" in path:
        asked = {"messages": [{"role": "user", "content": "hi"}]}
        if field == "logprobs":
            wrong, field = {"logprobs": True, "top_logprobs": wrong["logprobs"]}, "top_logprobs"
    request = s.http.build_request("POST", path, json={**asked, **wrong})  # the client's own work, not the server's
    started = time.monotonic()
    answer = await s.http.send(request)
    assert time.monotonic() - started < 1
    error = error_of(answer, 404 if field == "model" else 400)
    assert error["param"] == field
    assert len(error["message"]) < 400
    assert s.stage.device.steps == []
    assert s.engine._company.scheduler.core.table._last_seq_id == 0, "no sequence was made"
    await s.check_clean()


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "9" * 5000])
async def test_a_number_that_is_none_is_refused(served: Any, number: str) -> None:
    s = await served(block_size=4)
    answer = await s.http.post("/v1/completions", content=b'{"prompt": "x", "temperature": ' + number.encode() + b"}")
    assert error_of(answer, 400)
    await s.check_clean()


@pytest.mark.parametrize("prompt", [["x"] * 300, [[5]] * 300, ["x"] * 200_000, [[]] * 200_000])
async def test_too_many_prompts_are_refused(served: Any, prompt: Any) -> None:
    s = await served(block_size=4)
    request = s.http.build_request("POST", "/v1/completions", json={"prompt": prompt})
    started = time.monotonic()
    error = error_of(await s.http.send(request), 400)
    assert time.monotonic() - started < 1
    assert error["param"] in ("prompt", None), "what has too many values is not looked into"
    await s.check_clean()


async def test_many_prompts_with_many_choices_each_are_refused(served: Any) -> None:
    s = await served(block_size=4)
    assert error_of(await s.complete([prompt_of(5)] * 200, n=20), 400)["param"] == "n"
    assert s.stage.device.steps == []
    await s.check_clean()


@pytest.mark.parametrize("name", ["x-request-id", "x-anything", "authorization"])
async def test_a_header_of_64_kb_is_refused(served: Any, name: str) -> None:
    s = await served(block_size=4)
    answer = await s.http.post("/v1/completions", json={"prompt": "x"}, headers={name: "x" * 65_536})
    assert error_of(answer, 400)
    assert len(answer.text) < 400
    assert s.stage.device.steps == []
    await s.check_clean()


@pytest.mark.parametrize(
    "start", [b"GET /", b"GET / HTTP/1.1\r\nx: ", b"POST /health HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;"]
)
async def test_a_head_without_an_end_closes_the_connection(served: Any, start: bytes) -> None:
    s = await served(block_size=4)
    async with s.connection() as client:
        client.writer.write(start)
        num_sent = 0
        while not client.reader.at_eof() and num_sent < 64 << 20:
            try:
                client.writer.write(b"x" * 65_536)
                await client.writer.drain()
            except ConnectionError:
                break
            num_sent += 65_536
        assert num_sent < 32 << 20, "it was cut off"
    assert (await s.http.get("/health")).status_code == 200


async def test_a_body_above_the_limit_is_refused_whether_it_says_so_or_not(served: Any) -> None:
    s = await served(block_size=4)
    assert error_of(await s.http.post("/v1/completions", content=b" " * (33 << 20)), 413)

    async def pieces() -> Any:
        for _ in range(66):
            yield b" " * (1 << 19)

    assert error_of(await s.http.post("/tokenize", content=pieces()), 413)
    await s.check_clean()


async def test_others_see_nothing_of_it(served: Any) -> None:
    s = await served(block_size=4)
    running = s.stage.begin(prompt_of(9), greedy(30))
    for wrong in WRONG:
        await s.complete(prompt_of(5), **wrong)
    assert (await running).outputs[0].token_ids == s.stage.alone(prompt_of(9), greedy(30)).token_ids
    await s.check_clean()
