"""How answers are written, from outputs that a test made: log-probabilities, echoes, and what JSON cannot say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from repertory import CompletionOutput, Logprob, RequestOutput
from repertory.actors.frontends.http.chat import ChatForm
from repertory.actors.frontends.http.completions import CompletionForm
from repertory.actors.frontends.http.requests import ChatRequest, CompletionRequest
from repertory.actors.frontends.http.responses import usage_of
from repertory.actors.frontends.http.sending import encode

INFINITE = float("-inf")
PROMPT = [None, {6: Logprob(-0.5, 3, "b"), 9: Logprob(-0.1, 1, "x"), 8: Logprob(-0.2, 2, "y")}]
ANSWER = [{7: Logprob(-2.0, 2, "c"), 5: Logprob(-1.0, 1, "a")}, {5: Logprob(INFINITE, 300, "a"), 7: Logprob(-0.3, 1, "c")}]


def output_of(**fields: Any) -> RequestOutput:
    one = CompletionOutput(0, "ca", [7, 5], -9.0, ANSWER, "length")
    return RequestOutput("r", "ab", [5, 6], [one], True, **fields)


def letters(token_ids: list[int]) -> str:
    return "".join({5: "a", 6: "b"}[token] for token in token_ids)


async def written(form: CompletionForm | ChatForm, output: RequestOutput) -> Any:
    await form.prepare(output, 0)
    return json.loads(encode(form.whole([output], usage_of(2, 2, 0))))


def completion_form(**fields: Any) -> CompletionForm:
    return CompletionForm(CompletionRequest(**fields), "r", "m", decode=letters)


async def test_columns_of_logprobs_hold_the_chosen_token_and_the_likeliest() -> None:
    answer = await written(completion_form(logprobs=1), output_of())
    assert answer["choices"][0]["logprobs"] == {
        "text_offset": [0, 1],
        "tokens": ["c", "a"],
        "token_logprobs": [-2.0, -9999.0],
        "top_logprobs": [{"a": -1.0, "c": -2.0}, {"c": -0.3, "a": -9999.0}],
    }


async def test_an_echo_with_logprobs_begins_with_the_prompts() -> None:
    answer = await written(completion_form(logprobs=1, echo=True), output_of(prompt_logprobs=PROMPT))
    [choice] = answer["choices"]
    assert choice["text"] == "abca"
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2, 3],
        "tokens": ["a", "b", "c", "a"],
        "token_logprobs": [None, -0.5, -2.0, -9999.0],
        "top_logprobs": [None, {"x": -0.1, "b": -0.5}, {"a": -1.0, "c": -2.0}, {"c": -0.3, "a": -9999.0}],
    }
    assert "prompt_logprobs" not in choice


async def test_an_echo_alone_has_the_prompts_logprobs_only() -> None:
    answer = await written(completion_form(logprobs=0, echo=True, max_tokens=0), output_of(prompt_logprobs=PROMPT))
    [choice] = answer["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("ab", ["a", "b"])
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -0.5}]


async def test_prompt_logprobs_have_vllms_shape_at_vllms_place() -> None:
    entry = {"6": {"logprob": -0.5, "rank": 3, "decoded_token": "b"}}
    output = output_of(prompt_logprobs=[None, {6: Logprob(-0.5, 3, "b")}])
    of_completion = await written(completion_form(prompt_logprobs=0), output)
    assert of_completion["choices"][0]["prompt_logprobs"] == [None, entry]
    of_chat = await written(ChatForm(ChatRequest(prompt_logprobs=0), "r", "m"), output)
    assert of_chat["prompt_logprobs"] == [None, entry]
    assert "prompt_logprobs" not in of_chat["choices"][0]


async def test_what_json_cannot_say_is_said_otherwise() -> None:
    output = output_of(prompt_logprobs=[None, {6: Logprob(INFINITE, 3, "b")}])
    answer = await written(completion_form(prompt_logprobs=0, logprobs=0), output)
    assert answer["choices"][0]["prompt_logprobs"][1]["6"]["logprob"] == -9999.0


async def test_logprobs_of_a_chat_have_bytes_and_as_many_as_asked_for() -> None:
    answer = await written(ChatForm(ChatRequest(logprobs=True, top_logprobs=1), "r", "m"), output_of())
    first, second = answer["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "c",
        "logprob": -2.0,
        "bytes": [99],
        "top_logprobs": [{"token": "a", "logprob": -1.0, "bytes": [97]}],
    }
    assert second["logprob"] == -9999.0
    none = await written(ChatForm(ChatRequest(), "r", "m"), output_of())
    assert none["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_choice_ends_once_whatever_else_comes_of_its_request(kind: str) -> None:
    form = ChatForm(ChatRequest(n=2), "r", "m") if kind == "chat" else completion_form(n=2)
    first = CompletionOutput(0, "a", [5], finish_reason="stop")
    second = CompletionOutput(1, "", [])
    found = form.events(RequestOutput("r", "ab", [5, 6], [first, second], False), 4)
    assert found.count(b'"finish_reason":"stop"') == 1
    assert b'"index":4' in found and b'"index":5' not in found, "of the second nothing has come"
    again = CompletionOutput(0, "", [], finish_reason="stop")
    later = form.events(RequestOutput("r", "ab", [5, 6], [again, CompletionOutput(1, "b", [6])], False), 4)
    assert b'"index":4' not in later and b'"index":5' in later
