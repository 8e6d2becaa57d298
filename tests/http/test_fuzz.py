"""Random bytes and mutated bodies on every route: no answer is a 500, nothing crashes, and another client is served as ever."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from repertory.gpu.structured import Grammars
from repertory.tests.engine.stage import EOS, greedy, prompt_of
from repertory.tests.http.served import Served

NUM_EXAMPLES = 1500
POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
GETS = ("/health", "/ready", "/v1/models", "/v1/models/x", "/version", "/server_info", "/model_info", "/", "/v1/nothing")

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "hello", "max_tokens": 3, "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1,
        "stop": ["x"], "logprobs": 2, "echo": True, "stream": True, "stream_options": {"include_usage": True},
        "logit_bias": {"5": 1.0}, "stop_token_ids": [7], "allowed_token_ids": [5, 6], "bad_words": ["a"], "min_tokens": 1,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "priority": 1,
        "tenant": "t", "cache_salt": "s", "request_id": "r", "return_token_ids": True, "skip_special_tokens": False,
        "best_of": 2,
        "response_format": {"type": "json_object"}, "guided_regex": "a", "structured_outputs": {"choice": ["a"]},
        "prompt_logprobs": 1, "suffix": "x", "include_stop_str_in_output": True, "model": None, "use_beam_search": False,
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_completion_tokens": 3, "n": 1,
        "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto", "logprobs": True,
        "top_logprobs": 2, "chat_template_kwargs": {"a": 1}, "add_generation_prompt": True, "stream": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    },
    "/tokenize": {"prompt": "hello", "add_special_tokens": True, "return_token_strs": True, "messages": None},
    "/detokenize": {"tokens": [5, 6, 7]},
}  # fmt: skip
"""One with every field; `smaller` takes most of them away again."""

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30, 1e308, -1e308, 1e-320]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["", "\0", "\ud800", "<|im_end|>", "{{ 1 }}", "a" * 3000]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """A method, a path and a body."""
    path = draw(st.sampled_from([*POSTS, *GETS]))
    method = draw(st.sampled_from(["POST"] * 8 + ["GET", "PUT", "DELETE", "OPTIONS"])) if path in POSTS else "GET"
    kind = draw(st.sampled_from(["mutated"] * 6 + ["value", "bytes", "damaged"]))
    if kind == "bytes" or path not in BODIES:
        return method, path, draw(st.binary(max_size=200))
    if kind == "value":
        return method, path, json.dumps(draw(values)).encode()
    body = json.dumps(draw(mutated(BODIES[path]))).encode()
    if kind == "damaged":
        at = draw(st.integers(0, len(body)))
        body = body[:at] + draw(st.binary(max_size=3)) + body[at + draw(st.integers(0, 3)) :]
    return method, path, body


@st.composite
def mutated(draw: st.DrawFn, body: dict[str, Any]) -> Any:
    """A body with some of its fields, of which some have other values, at any depth."""
    required = {"prompt", "messages", "tokens"}
    kept = {key: value for key, value in body.items() if key in required or draw(st.integers(0, 4)) == 0}
    found = copy.deepcopy(kept)
    for _ in range(draw(st.integers(0, 3))):
        if found:
            _change(draw, found)
    return found


def _change(draw: st.DrawFn, value: Any) -> None:
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw(st.sampled_from(keys))
    inner = value[key]
    if isinstance(inner, (dict, list)) and inner and draw(st.booleans()):
        _change(draw, inner)
    elif draw(st.integers(0, 5)) == 0 and isinstance(value, dict):
        value[draw(st.text(max_size=6))] = value.pop(key)
    else:
        value[key] = draw(values)


raw_pieces = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            b"GET /health HTTP/1.1\r\n",
            b"POST /v1/completions HTTP/1.1\r\n",
            b"HTTP/1.1",
            b"host: x\r\n",
            b"content-length: 5\r\n",
            b"content-length: -1\r\n",
            b"content-length: 99999999999999999999\r\n",
            b"transfer-encoding: chunked\r\n",
            b"upgrade: websocket\r\nconnection: upgrade\r\n",
            b"expect: 100-continue\r\n",
            b"x-request-id: \x01\xff\r\n",
            b"authorization: Bearer \xff\r\n",
            b"\r\n",
            b"5\r\nhello\r\n0\r\n\r\n",
            b'{"prompt": "x", "max_tokens": 2}',
            b"GET http://[::1 HTTP/1.1\r\n\r\n",
            b"GET /%ff%00%zz HTTP/1.1\r\n\r\n",
        ]
    ),
)


async def unharmed(s: Served, other: asyncio.Task[Any]) -> None:
    """The request that ran beside it all answers as alone, and nothing is left."""
    answer = await other
    assert answer.json()["choices"][0]["token_ids"] == s.stage.alone(prompt_of(9), greedy(50)).token_ids
    await s.check_clean()
    s.stage.device.steps.clear()


def _settings(num_examples: int) -> settings:
    checks = [
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ]
    return settings(
        max_examples=num_examples, deadline=None, suppress_health_check=checks, phases=[Phase.explicit, Phase.generate]
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_no_body_on_any_route_is_a_500_or_harms_another(served: Any, paper_model: Path) -> None:
    grammars = Grammars(paper_model / "tokenizer.json", vocab_size=320, eos_token_ids=[EOS])
    s = await served(block_size=4, num_device_blocks=512, max_model_len=512, grammars=grammars)
    for batch in _drawn(requests(), NUM_EXAMPLES, 20):
        other = asyncio.ensure_future(s.complete(prompt_of(9), 50))
        for (method, path, body), answer in zip(
            batch, await asyncio.gather(*(s.http.request(m, p, content=b) for m, p, b in batch)), strict=True
        ):
            assert answer.status_code < 500 or answer.json()["error"]["code"] == 503, (method, path, body, answer.text)
            if answer.status_code >= 400:
                assert answer.json()["error"].keys() == {"message", "type", "param", "code"}, (method, path, body)
            assert '"code":500' not in answer.text, (method, path, body, answer.text)
        await unharmed(s, other)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_no_bytes_on_a_connection_harm_another(served: Any) -> None:
    s = await served(block_size=4)
    for batch in _drawn(st.lists(raw_pieces, min_size=1, max_size=8), NUM_EXAMPLES, 20):
        other = asyncio.ensure_future(s.complete(prompt_of(9), 50))
        await asyncio.gather(*(_say(s, b"".join(pieces)) for pieces in batch))
        await unharmed(s, other)
    assert (await s.http.get("/health")).status_code == 200


async def _say(s: Served, content: bytes) -> None:
    async with s.connection() as client:
        client.writer.write(content)
        client.writer.write_eof()
        found = await client.rest()
        assert b" 500 " not in found.split(b"\r\n")[0], (content, found)


def _drawn(strategy: st.SearchStrategy[Any], num: int, size: int) -> list[list[Any]]:
    """Examples of a strategy, in batches: hypothesis runs a plain function, and the server runs on this loop."""
    found: list[Any] = []

    @_settings(num)
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return [found[first : first + size] for first in range(0, len(found), size)]


async def test_a_field_that_is_an_object_where_none_belongs_is_no_500(served: Any) -> None:
    """A few of the fuzzer's requests, in every run of the tests."""
    s = await served(block_size=4, max_model_len=512)
    for path, body in BODIES.items():
        required = {key: body[key] for key in ("prompt", "messages", "tokens") if key in body}
        for field in body:
            answer = await s.http.post(path, json={**required, field: {"a": [1]}})
            assert answer.status_code in (200, 400), (path, field, answer.text)
    await s.check_clean()
