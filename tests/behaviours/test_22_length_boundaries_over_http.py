"""22, over HTTP. Prompt and output together have `max_model_len` tokens, counted after the template."""

from __future__ import annotations

from typing import Any

import pytest

from repertory.tests.engine.stage import greedy, prompt_of
from repertory.tests.http.served import error_of, events_of


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"), [(14, 1, 1), (14, 10, 2), (15, 1, 1), (15, 10, 1), (1, 100, 15), (3, 16, 13)]
)
async def test_an_output_takes_what_room_there_is(
    served: Any, length: int, max_tokens: int, expected: int, stream: bool
) -> None:
    s = await served(block_size=4, max_model_len=16, num_device_blocks=16)
    answer = await s.complete(prompt_of(length), max_tokens, stream=stream)
    choices = [event["choices"][0] for event in events_of(answer)[:-1]] if stream else answer.json()["choices"]
    token_ids = [token for choice in choices for token in choice["token_ids"]]
    assert token_ids == s.stage.alone(prompt_of(length), greedy(expected)).token_ids
    assert choices[-1]["finish_reason"] == "length"
    await s.check_clean()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [16, 17, 1000])
async def test_a_prompt_that_leaves_no_room_is_refused_and_the_next_served(served: Any, length: int, stream: bool) -> None:
    s = await served(block_size=32, max_model_len=16, num_device_blocks=16)
    for max_tokens in (None, 1, 10):
        error = error_of(await s.complete(prompt_of(length), max_tokens, stream=stream), 400)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert f"{length} tokens" in error["message"]
    assert (await s.complete(prompt_of(14))).json()["usage"]["completion_tokens"] == 2
    await s.check_clean()


async def test_a_chat_without_max_tokens_takes_all_the_room_after_its_template(served: Any) -> None:
    s = await served(max_model_len=40)
    lengths = []
    for size in range(40):
        answer = await s.chat([{"role": "user", "content": "7" * size}])
        if answer.status_code == 400:
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            break
        usage = answer.json()["usage"]
        assert usage["total_tokens"] == 40
        lengths.append(usage["prompt_tokens"])
    assert lengths[-1] == 39, "the longest that is served leaves room for one token"
    await s.check_clean()
