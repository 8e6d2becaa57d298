"""23, over HTTP. `X-Request-Id` and `request_id` are labels: they may repeat, and nobody gets another's tokens."""

from __future__ import annotations

import asyncio
from typing import Any

from repertory.tests.engine.stage import greedy, prompt_of, until


async def test_requests_with_one_id_complete_on_their_own(served: Any) -> None:
    s = await served(block_size=4)
    answers = await asyncio.gather(*(s.complete(prompt_of(9, seed), 10, request_id="same") for seed in range(4)))
    for seed, answer in enumerate(answers):
        assert answer.json()["id"] == "cmpl-same"
        assert answer.json()["choices"][0]["token_ids"] == s.stage.alone(prompt_of(9, seed), greedy(10)).token_ids
    await s.check_clean()


async def test_a_connection_that_closes_reaches_no_newer_request_with_its_id(served: Any) -> None:
    s = await served(block_size=4)
    for seed in range(5):
        async with s.connection() as client:
            asked = {"prompt": prompt_of(9, 1), "max_tokens": 500, "ignore_eos": True, "stream": True}
            client.post("/v1/completions", asked, x_request_id="same")
            await client.event()
            client.hang_up()
            answer = await s.complete(prompt_of(9, seed), 10, request_id="same")
        assert answer.json()["choices"][0]["token_ids"] == s.stage.alone(prompt_of(9, seed), greedy(10)).token_ids
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    await s.check_clean()


async def test_an_abort_ends_what_has_the_id_now_and_its_client_is_told(served: Any) -> None:
    s = await served(block_size=4)
    async with s.connection() as client:
        asked = {"prompt": prompt_of(9, 1), "max_tokens": 500, "ignore_eos": True, "stream": True}
        client.post("/v1/completions", asked, x_request_id="same")
        await client.event()
        await s.engine.abort("same")
        while (event := await client.event()) is not None:
            last = event
        assert last["choices"][0]["finish_reason"] == "abort"
    await s.check_clean()


async def test_one_that_is_aborted_before_its_first_token_is_answered(served: Any) -> None:
    s = await served(block_size=4)
    s.stage.gate.shut()
    asking = [
        asyncio.ensure_future(s.complete(prompt_of(9), 500, request_id="same", stream=stream)) for stream in (True, False)
    ]
    await until(lambda: s.engine._company.scheduler.core.num_live == 2)
    await s.engine.abort("same")
    s.stage.gate.open()
    streamed, whole = await asyncio.gather(*asking)
    assert whole.json()["choices"][0]["finish_reason"] == "abort"
    assert '"finish_reason":"abort"' in streamed.text and streamed.text.endswith("data: [DONE]\n\n")
    await s.check_clean()
