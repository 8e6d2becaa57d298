"""The official `openai` client against `repertory serve`: all its processes, two frontends, the demo model.

What it sends and reads is its own business: a field in the wrong shape fails where the client looks for it. What it cannot
send comes from plain HTTP.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from .server_process import server_process

KEY = "a key"
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def url(demo_model: Path) -> Iterator[str]:
    settings = {
        "model": str(demo_model),
        "served_model_name": "smollm",
        "api_key": KEY,
        "dtype": "float32",
        "num_threads": 1,
        "num_device_blocks": 512,
        "max_model_len": 2048,
        "kv_offloading_size": 0,
        "frontends": 2,
        "log_level": "warning",
    }
    with server_process(**settings) as found:
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def paris(client: openai.OpenAI) -> Any:
    """The answer that the others are compared with."""
    return client.chat.completions.create(model="smollm", messages=FRANCE, temperature=0, max_tokens=12)  # type: ignore[arg-type]


# ---- chats ------------------------------------------------------------------------------------------


def test_a_chat_is_answered(paris: Any) -> None:
    assert paris.object == "chat.completion"
    assert paris.model == "smollm"
    [choice] = paris.choices
    assert (choice.index, choice.message.role) == (0, "assistant")
    assert "Paris" in choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = paris.usage
    assert usage.prompt_tokens > 20
    assert 1 <= usage.completion_tokens <= 12
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_a_streamed_chat_says_the_same_in_pieces(client: openai.OpenAI, paris: Any) -> None:
    chunks = list(
        client.chat.completions.create(
            model="smollm",
            messages=FRANCE,
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *chunks, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == paris.usage.completion_tokens
    assert last.usage.prompt_tokens_details.cached_tokens > 0, "the same prompt for the second time"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None and chunk.usage is None for chunk in chunks[1:])
    assert {chunk.id for chunk in [*chunks, last]} == {last.id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == paris.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == paris.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}


def test_without_include_usage_a_stream_has_none(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="smollm", messages=FRANCE, max_tokens=3, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_the_clients_own_stream_helper_reads_it(client: openai.OpenAI, paris: Any) -> None:
    with client.chat.completions.stream(model="smollm", messages=FRANCE, temperature=0, max_tokens=12) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.content == paris.choices[0].message.content
    assert "content.delta" in kinds and "content.done" in kinds


def test_max_completion_tokens_wins_over_max_tokens(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="smollm", messages=FRANCE, max_completion_tokens=2, max_tokens=9)
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (2, "length")


def test_content_in_parts_is_text(client: openai.OpenAI, paris: Any) -> None:
    parts = [{"type": "text", "text": FRANCE[0]["content"]}]
    found = client.chat.completions.create(
        model="smollm", messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=12
    )
    assert found.choices[0].message.content == paris.choices[0].message.content


def test_logprobs_of_a_chat(client: openai.OpenAI, paris: Any) -> None:
    found = client.chat.completions.create(
        model="smollm", messages=FRANCE, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    entries = found.choices[0].logprobs.content
    assert len(entries) == found.usage.completion_tokens
    assert paris.choices[0].message.content.startswith("".join(entry.token for entry in entries[:2]))
    for entry in entries:
        assert entry.logprob <= 0
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)


def test_logprobs_come_with_the_chunks(client: openai.OpenAI) -> None:
    ask = {"model": "smollm", "messages": FRANCE, "temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**ask)
    parts = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**ask, stream=True)]
    entries = [entry for part in parts if part is not None for entry in part.content]
    assert [entry.token for entry in entries] == [entry.token for entry in whole.choices[0].logprobs.content]
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(entries)


def test_several_choices_are_told_apart(client: openai.OpenAI) -> None:
    ask = {"model": "smollm", "messages": FRANCE, "temperature": 1.0, "seed": 7, "max_tokens": 6, "n": 3}
    whole = client.chat.completions.create(**ask)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts, roles, ends = ["", "", ""], [0, 0, 0], [0, 0, 0]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            ends[choice.index] += choice.finish_reason is not None
    assert texts == [choice.message.content for choice in whole.choices]
    assert (roles, ends) == ([1, 1, 1], [1, 1, 1])


def test_tools_are_taken_in_whether_or_not_the_template_shows_them(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
    called = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 1}'}}
    messages = [
        *FRANCE,
        {"role": "assistant", "content": "I look it up.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "Paris"},
    ]
    found = client.chat.completions.create(model="smollm", messages=messages, tools=tools, tool_choice="auto", max_tokens=3)
    assert found.choices[0].message.content
    assert found.choices[0].message.tool_calls is None


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_its_schema(client: openai.OpenAI, stream: bool) -> None:
    messages = [{"role": "user", "content": "How many legs has a dog? As JSON."}]
    form = {"type": "json_schema", "json_schema": {"name": "legs", "schema": SCHEMA, "strict": True}}
    found = client.chat.completions.create(
        model="smollm", messages=messages, temperature=0, max_tokens=60, response_format=form, stream=stream
    )
    texts = (chunk.choices[0].delta.content or "" for chunk in found) if stream else [found.choices[0].message.content]
    text = "".join(texts)
    assert isinstance(json.loads(text)["n"], int)


def test_any_json_object(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "A dog as a small JSON object"}]
    found = client.chat.completions.create(
        model="smollm", messages=messages, temperature=0, max_tokens=40, response_format={"type": "json_object"}
    )
    if found.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(found.choices[0].message.content), dict)
    else:
        assert found.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"guided_choice": ["red", "blue"]}, ("red", "blue")),
        ({"guided_regex": "a{3}"}, ("aaa",)),
    ],
)
def test_the_extra_ways_to_constrain_a_text(client: openai.OpenAI, extra: dict[str, Any], pattern: tuple[str, ...]) -> None:
    found = client.chat.completions.create(model="smollm", messages=FRANCE, max_tokens=10, extra_body=extra)
    assert found.choices[0].message.content in pattern
    assert found.choices[0].finish_reason == "stop"


# ---- completions -------------------------------------------------------------------------------------


def test_a_completion_and_its_stream_are_equal(client: openai.OpenAI) -> None:
    ask = {"model": "smollm", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**ask)
    assert (whole.object, whole.choices[0].finish_reason) == ("text_completion", "length")
    assert (whole.usage.completion_tokens, whole.choices[0].logprobs) == (8, None)
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_sixteen_tokens_are_the_default_of_a_completion(client: openai.OpenAI) -> None:
    found = client.completions.create(model="smollm", prompt="One, two, three, four, five,", temperature=0)
    assert found.usage.completion_tokens == 16


def test_many_prompts_with_many_choices_keep_their_order(client: openai.OpenAI) -> None:
    prompts = ["The sea", "A dog", "My house"]
    found = client.completions.create(model="smollm", prompt=prompts, n=2, seed=3, max_tokens=4, echo=True)
    assert [choice.index for choice in found.choices] == list(range(6))
    assert [choice.text.startswith(prompts[choice.index // 2]) for choice in found.choices] == [True] * 6
    assert found.usage.completion_tokens == 24
    texts = [""] * 6
    ask = {"model": "smollm", "prompt": prompts, "n": 2, "seed": 3, "max_tokens": 4, "echo": True}
    for chunk in client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in found.choices]


def test_ids_are_as_good_as_text(client: openai.OpenAI, http: httpx2.Client) -> None:
    text = "The capital of France is"
    ids = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    ask = {"model": "smollm", "temperature": 0, "max_tokens": 4}
    of_text = client.completions.create(**ask, prompt=text)
    of_ids = client.completions.create(**ask, prompt=[ids, ids], echo=True)
    assert [choice.text for choice in of_ids.choices] == [text + of_text.choices[0].text] * 2
    assert client.completions.create(**ask, prompt=ids).choices[0].text == of_text.choices[0].text


def test_an_echo_alone(client: openai.OpenAI) -> None:
    found = client.completions.create(model="smollm", prompt="Only this", echo=True, max_tokens=0)
    assert (found.choices[0].text, found.usage.completion_tokens) == ("Only this", 0)


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    found = client.completions.create(model="smollm", prompt="Once upon a", temperature=0, max_tokens=4, logprobs=2)
    logprobs = found.choices[0].logprobs
    assert "".join(logprobs.tokens) == found.choices[0].text
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:number])) for number in range(4)]
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert value == max(top.values()) == top[token] <= 0
        assert len(top) == 2


def test_a_stop_string_ends_it(client: openai.OpenAI) -> None:
    ask = {"model": "smollm", "prompt": "One, two, three, four,", "temperature": 0, "max_tokens": 20}
    whole = client.completions.create(**ask)
    stop = whole.choices[0].text[4:9]
    found = client.completions.create(**ask, stop=[stop, "never to be found"])
    assert found.choices[0].text == whole.choices[0].text.split(stop)[0]
    assert (found.choices[0].finish_reason, found.choices[0].stop_reason) == ("stop", stop)


def test_a_seed_repeats_and_extra_fields_of_sampling_reach_the_engine(client: openai.OpenAI) -> None:
    ask = {"model": "smollm", "prompt": "The best thing is", "max_tokens": 8, "seed": 11, "temperature": 1.5}
    texts = {client.completions.create(**ask).choices[0].text for _ in range(2)}
    assert len(texts) == 1
    greedy = client.completions.create(**{**ask, "temperature": 0}).choices[0].text
    top_one = client.completions.create(**ask, extra_body={"top_k": 1}).choices[0].text
    assert top_one == greedy
    extra = {"ignore_eos": True, "min_tokens": 3, "return_token_ids": True, "skip_special_tokens": False, "min_p": 0.01}
    found = client.completions.create(**ask, extra_body={**extra, "repetition_penalty": 1.1, "stop_token_ids": [5]})
    assert len(found.choices[0].token_ids) == found.usage.completion_tokens
    assert len(found.choices[0].prompt_token_ids) == found.usage.prompt_tokens


def test_a_bias_bans_and_forces(client: openai.OpenAI, http: httpx2.Client) -> None:
    [token] = http.post("/tokenize", json={"prompt": " fish"}).json()["tokens"]
    found = client.completions.create(model="smollm", prompt="I like", max_tokens=2, logit_bias={str(token): 100})
    assert found.choices[0].text == " fish fish"
    allowed = client.completions.create(
        model="smollm", prompt="I like", max_tokens=2, extra_body={"allowed_token_ids": [token]}
    )
    assert allowed.choices[0].text == " fish fish"
    ask = {"model": "smollm", "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
    assert "Paris" in client.completions.create(**ask).choices[0].text
    assert "Paris" not in client.completions.create(**ask, extra_body={"bad_words": ["Paris"]}).choices[0].text


def test_unknown_fields_and_nulls_are_ignored(http: httpx2.Client) -> None:
    body = {"model": "smollm", "prompt": "Hi", "max_tokens": 2, "no_stop_trim": False, "separate_reasoning": {"a": [1]}}
    nulls = dict.fromkeys(["stop", "n", "logprobs", "logit_bias", "seed", "temperature", "suffix", "stream_options"])
    assert http.post("/v1/completions", json={**body, **nulls}).status_code == 200


# ---- the other endpoints --------------------------------------------------------------------------------


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("smollm", "model", "repertory")
    assert model.max_model_len == 2048
    assert client.models.retrieve("smollm").id == "smollm"


def test_tokens_there_and_back(http: httpx2.Client) -> None:
    text = "Grüße, 世界! 🙂"
    found = http.post("/tokenize", json={"model": "smollm", "prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 2048
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": FRANCE}).json()["tokens"]
    rendered = http.post("/detokenize", json={"tokens": chat}).json()["prompt"]
    assert FRANCE[0]["content"] in rendered and rendered.endswith("<|im_start|>assistant\n")
    closed = http.post("/tokenize", json={"messages": FRANCE, "add_generation_prompt": False}).json()["tokens"]
    assert closed == chat[: len(closed)] and len(closed) < len(chat)


def test_what_can_be_asked_without_the_key(url: str) -> None:
    with httpx2.Client(base_url=url) as stranger:
        assert stranger.get("/health").json() == {"status": "ok"}
        assert stranger.get("/ready").status_code == 200
        assert stranger.get("/version").json().keys() == {"version"}
        info = stranger.get("/model_info").json()
        assert (info["served_model_name"], info["is_generation"], info["max_model_len"]) == ("smollm", True, 2048)
        server = stranger.get("/server_info")
        assert server.json()["stats"]["device_blocks"]["total"] == 512
        assert KEY not in server.text


def test_metrics_are_those_of_the_whole_company_whichever_frontend_is_asked(url: str, client: openai.OpenAI) -> None:
    def samples() -> dict[str, float]:
        # A new connection each time: sometimes the other frontend's.
        text = httpx2.get(f"{url}/metrics")
        assert text.headers["content-type"].startswith("text/plain; version=")
        lines = [line.rpartition(" ") for line in text.text.splitlines() if not line.startswith("#")]
        return {name.replace('model_name="smollm"', ""): float(value) for name, _, value in lines}

    before = samples()["repertory_generation_tokens_total{}"]
    client.completions.create(model="smollm", prompt="One, two,", temperature=0, max_tokens=7, extra_body={"ignore_eos": True})
    for _ in range(4):
        found = samples()
        assert found["repertory_generation_tokens_total{}"] == before + 7
        assert found["repertory_num_requests_running{}"] == 0
    assert 'repertory_request_stage_seconds_total{,stage="decode"}' in found


# ---- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["wrong", "", "a", "ключ"])
def test_a_wrong_key_is_refused_in_the_clients_own_way(url: str, key: str) -> None:
    if key.isascii() and key:
        stranger = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError) as caught:
            stranger.models.list()
        assert caught.value.code == "invalid_api_key"
    for path in ("/v1/models", "/v1/anything", "/tokenize", "/detokenize", "/"):
        found = httpx2.get(url + path, headers={"authorization": b"Bearer x" + key.encode()})
        assert (found.status_code, found.headers["www-authenticate"]) == (401, "Bearer")
    assert httpx2.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 401


@pytest.mark.parametrize("stream", [False, True])
def test_another_model_does_not_exist(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt", messages=FRANCE, stream=stream)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_says_so(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smollm", prompt="word " * 5000, stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smollm", messages=[{"role": "user", "content": "x " * 10**6}], stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 10**6}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop": [1]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"seed": 2**70}, "seed"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"priority": 2**40}, "priority"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": 5}, "stream_options"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "bogus"}}}}, "response_format"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"request_id": "x" * 65_536}, "request_id"),
    ({"model": 5}, "model"),
    ({"stream": "yes"}, "stream"),
]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(("wrong", "field"), WRONG, ids=lambda value: str(value)[:40])
def test_a_bad_value_is_refused_with_its_name(http: httpx2.Client, path: str, wrong: dict[str, Any], field: str) -> None:
    asked = {"prompt": "Hi"} if path == "completions" else {"messages": FRANCE}
    answer = http.post(f"/v1/{path}", json={"model": "smollm", **asked, **wrong})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert field in error["message"] or "structured_outputs" in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tools": [5]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_value_of_a_chat_is_too(http: httpx2.Client, wrong: dict[str, Any], field: str, stream: bool) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": FRANCE, "stream": stream, **wrong})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, [], "", [[]], [""], [1.5], [True], [-1], [2**63], ["a", [1]], [[1], "a"], [{}]]
)
def test_what_is_no_prompt_is_refused(http: httpx2.Client, prompt: Any) -> None:
    answer = http.post("/v1/completions", json={"prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt"), answer.text


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b'"x"', b"\xff\xfe", b"null", b"[" * 10_000, b'{"a": ' * 10_000])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_what_is_no_json_object_is_refused(http: httpx2.Client, path: str, body: bytes) -> None:
    answer = http.post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "tokens"),
        ({"tokens": 5}, "tokens"),
        ({"tokens": [10**9]}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": ["a"]}, "tokens"),
    ],
    ids=str,
)
def test_bad_tokens_are_not_turned_into_text(http: httpx2.Client, body: dict[str, Any], field: str) -> None:
    answer = http.post("/detokenize", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/nothing", 404)])
def test_what_is_not_there_is_said_in_the_same_shape(http: httpx2.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)


def test_the_id_of_a_request_comes_back(http: httpx2.Client) -> None:
    ask = {"prompt": "Hi", "max_tokens": 1}
    named = http.post("/v1/completions", json=ask, headers={"x-request-id": "mine___prefill_addr_1"})
    assert named.headers["x-request-id"] == "mine___prefill_addr_1"
    assert named.json()["id"] == "cmpl-mine___prefill_addr_1"
    in_body = http.post("/v1/completions", json={**ask, "request_id": "theirs"})
    assert (in_body.headers["x-request-id"], in_body.json()["id"]) == ("theirs", "cmpl-theirs")
    unnamed = [http.post("/v1/completions", json=ask).headers["x-request-id"] for _ in range(2)]
    assert len(set(unnamed)) == 2
    refused = http.post("/v1/completions", json={}, headers={"x-request-id": "mine"})
    assert refused.headers["x-request-id"] == "mine"
    odd = http.post("/v1/completions", json={**ask, "request_id": "a\r\nset-cookie: b\u20ac"})
    assert odd.headers["x-request-id"] == "a??set-cookie: b?"
    assert "set-cookie" not in odd.headers


async def test_the_asynchronous_client_reads_many_streams_at_once(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:

        async def one(number: int) -> str:
            stream = await client.completions.create(
                model="smollm", prompt=f"The number {number} is", max_tokens=5, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        together = await asyncio.gather(*map(one, range(8)))
        assert together[3] == await one(3)
        assert all(together)
