"""What the server says of itself and when it turns requests away: life, readiness, draining, room, and its key."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from repertory import ConfigError, Engine, EngineDeadError
from repertory.actors.frontends.http import facts
from repertory.actors.frontends.http.app import make_app
from repertory.actors.frontends.http.server import serve_embedded
from repertory.tests.engine.stage import prompt_of, until
from repertory.tests.http.served import error_of, events_of
from repertory.tests.tiny_model import make_tiny_model

HELLO = [{"role": "user", "content": "hello"}]


# ---- refusals ---------------------------------------------------------------------------------------


async def test_each_answer_that_is_an_error_leaves_a_line(served: Any, log_lines: list[dict[str, Any]]) -> None:
    s = await served(block_size=4)
    await s.complete("x", temperature=-1, request_id="wrong")
    await s.http.post("/v1/completions", content=b"{")
    await s.http.get("/v1/" + "nothing" * 100, headers={"x-request-id": "lost"})
    await s.http.get("/health", headers={"x-request-id": "x" * 2000})
    await s.http.get("/v1/models/" + "%00" * 4000)
    async with s.connection() as client:
        client.writer.write(b"no request\r\n\r\n")
        await client.reader.read()
    s.draining = True
    await s.chat(HELLO)
    await s.http.get("/health")
    lines = [line for line in log_lines if line["event"] == "http.refused"]
    said = [(line["status"], line["path"], line.get("field")) for line in lines]
    chats, completions = "/v1/chat/completions", "/v1/completions"
    lost = ("/v1/" + "nothing" * 100)[:200]
    assert said == [
        (400, completions, "temperature"), (400, completions, None), (404, lost, None), (400, "/health", "request_id"),
        (404, ("/v1/models/" + "\0" * 4000)[:200], "model"), (400, "", None), (503, chats, None),
    ]  # fmt: skip
    assert [lines[number]["label"] for number in (0, 2)] == ["wrong", "lost"]
    assert all(0 < len(line["reason"]) < 400 for line in lines)


# ---- life -------------------------------------------------------------------------------------------


async def test_while_draining_new_requests_are_503_and_what_runs_goes_on(served: Any) -> None:
    s = await served(block_size=4)
    s.stage.gate.shut()
    running = asyncio.ensure_future(s.complete(prompt_of(9), 10))
    await s.stage.gate.arrival()
    s.draining = True
    for answer in (await s.complete("x"), await s.chat(HELLO), await s.complete("x", stream=True), await s.http.get("/ready")):
        assert "draining" in error_of(answer, 503)["message"]
        assert answer.headers["retry-after"] == "1"
    assert (await s.http.get("/health")).status_code == 200
    assert (await s.http.post("/tokenize", json={"prompt": "x"})).status_code == 200
    s.stage.gate.open()
    assert (await running).json()["usage"]["completion_tokens"] == 10
    s.draining = False
    assert (await s.complete("x")).status_code == 200
    await s.check_clean()


async def test_an_engine_that_drains_is_503_too(served: Any) -> None:
    s = await served(block_size=4)
    await s.engine.drain()
    for stream in (False, True):
        assert "draining" in error_of(await s.complete("x", stream=stream), 503)["message"]
    await s.check_clean()


async def test_when_the_engine_dies_streams_end_with_an_error_and_everything_is_503_at_once(served: Any) -> None:
    s = await served(block_size=4)
    async with s.connection() as client:
        client.post("/v1/completions", {"prompt": prompt_of(9), "max_tokens": 4000, "ignore_eos": True, "stream": True})
        await client.event()
        s.stage.device.on_step = _fail
        while "error" not in (event := await client.event()):
            pass
        assert event["error"]["code"] == 503
        assert [await client.line() for _ in range(4)] == ["", "", "0", ""], "nothing comes after the error"
    for answer in (
        await s.complete("x"),
        await s.complete("x", stream=True),
        await s.http.get("/health"),
        await s.http.get("/ready"),
    ):
        assert error_of(answer, 503)["type"] == "service_unavailable_error"
    assert (await s.http.get("/v1/models")).status_code == 503


async def test_an_engine_that_says_nothing_counts_as_dead(served: Any, monkeypatch: Any) -> None:
    s = await served()
    monkeypatch.setattr(facts, "HEALTH_TIMEOUT_S", 0.01)
    monkeypatch.setattr(s.engine, "check_health", asyncio.Event().wait)
    assert "said nothing" in error_of(await s.http.get("/health"), 503)["message"]


async def test_too_many_waiting_are_429_with_a_time_to_come_again(served: Any) -> None:
    s = await served(block_size=4, max_num_seqs=1, max_num_queued=2)
    s.stage.gate.shut()
    asking = [asyncio.ensure_future(s.complete(prompt_of(9, seed), 3)) for seed in range(3)]
    await until(lambda: len(s.engine._company.scheduler.core.queues.waiting) == 2)
    for stream in (False, True):
        answer = await s.complete(prompt_of(5), stream=stream)
        assert error_of(answer, 429)["code"] == "rate_limit_exceeded"
        assert int(answer.headers["retry-after"]) >= 1
    s.stage.gate.open()
    assert [(await one).status_code for one in asking] == [200] * 3
    await s.check_clean()


async def test_of_many_prompts_one_without_room_refuses_them_all_and_leaves_nothing(served: Any) -> None:
    s = await served(block_size=4, max_num_seqs=1, max_num_queued=2)
    s.stage.gate.shut()
    held = asyncio.ensure_future(s.complete(prompt_of(9), 3))
    await s.stage.gate.arrival()
    for stream in (False, True):
        answer = await s.complete([prompt_of(5, seed) for seed in range(6)], stream=stream)
        assert error_of(answer, 429)
    s.stage.gate.open()
    assert (await held).status_code == 200
    await s.check_clean()


# ---- the key and the name ----------------------------------------------------------------------------


async def test_a_key_guards_everything_but_what_says_nothing(served: Any) -> None:
    s = await served(api_key="sécret")
    for path in ("/v1/models", "/v1/completions", "/tokenize", "/detokenize", "/nothing", "/V1/models", "//v1/models"):
        for header in ({}, {"authorization": "Bearer x"}, {"authorization": "sécret"}, {"authorization": "Basic sécret"}):
            encoded = {key: value.encode("utf-8") for key, value in header.items()}
            assert error_of(await s.http.post(path, headers=encoded), 401)["code"] == "invalid_api_key"
    right = {"authorization": "bearer sécret".encode()}
    assert (await s.http.get("/v1/models", headers=right)).status_code == 200
    for path in ("/health", "/ready", "/version", "/server_info", "/model_info"):
        answer = await s.http.get(path)
        assert answer.status_code == 200
        assert "sécret" not in answer.text


async def test_the_served_name_is_the_only_one(served: Any) -> None:
    s = await served(served_model_name="a/name with spaces")
    assert (await s.complete("x", model="a/name with spaces")).json()["model"] == "a/name with spaces"
    assert (await s.http.get("/v1/models/a/name with spaces")).json()["id"] == "a/name with spaces"
    assert error_of(await s.complete("x", model=str(s.engine.config.model)), 404)["param"] == "model"
    assert error_of(await s.http.post("/tokenize", json={"model": "b", "prompt": "x"}), 404)
    await s.check_clean()


# ---- the model's own defaults -----------------------------------------------------------------------------


@pytest.fixture
def recommending(tmp_path: Path) -> Path:
    """A model that recommends greedy sampling, which nobody would draw by chance."""
    model = make_tiny_model(tmp_path / "model", weights=False)
    settings = {"temperature": 0.0, "top_k": 5, "top_p": None, "do_sample": True, "max_new_tokens": 3}
    (model / "generation_config.json").write_text(json.dumps(settings))
    return model


async def test_the_models_own_sampling_parameters_hold_where_a_request_is_silent(served: Any, recommending: Path) -> None:
    s = await served(model=str(recommending), block_size=4)
    expected = s.stage.alone(prompt_of(9)).token_ids
    silent = await s.http.post("/v1/completions", json={"prompt": prompt_of(9), "max_tokens": 5, "return_token_ids": True})
    assert silent.json()["choices"][0]["token_ids"] == expected
    null = await s.complete(prompt_of(9), temperature=None)
    assert null.json()["choices"][0]["token_ids"] == expected
    own = [await s.complete(prompt_of(9), temperature=1.5, seed=seed) for seed in range(8)]
    assert {tuple(answer.json()["choices"][0]["token_ids"]) for answer in own} != {tuple(expected)}
    await s.check_clean()


@pytest.mark.parametrize("settings", ['{"temperature": -1}', '{"top_k": 1.5}', '{"top_p": "x"}', "[", "[]"])
async def test_defaults_that_are_not_allowed_stop_the_start(tmp_path: Path, stage: Any, settings: str) -> None:
    model = make_tiny_model(tmp_path / "model", weights=False)
    s = await stage(model=str(model))
    (model / "generation_config.json").write_text(settings)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        make_app(s.engine)


async def test_an_engine_that_was_not_started_has_no_application(paper_model: Path) -> None:
    with pytest.raises(EngineDeadError):
        make_app(Engine(model=str(paper_model), device="simulated"))


# ---- how answers come -------------------------------------------------------------------------------------


async def test_the_head_of_a_stream_waits_for_its_first_token(served: Any) -> None:
    s = await served(block_size=4)
    s.stage.gate.shut()
    async with s.connection() as client:
        client.post("/v1/completions", {"prompt": prompt_of(9), "max_tokens": 3, "stream": True})
        await s.stage.gate.arrival()
        reading = asyncio.ensure_future(client.line())
        await asyncio.wait([reading], timeout=0.05)
        assert not reading.done()
        s.stage.gate.open()
        assert await reading == "HTTP/1.1 200 OK"
    await s.check_clean()


async def test_each_token_is_an_event_as_it_comes(served: Any) -> None:
    s = await served(block_size=4)
    s.stage.gate.shut()
    asked = {"prompt": prompt_of(9), "max_tokens": 5, "temperature": 0, "stream": True, "return_token_ids": True}
    async with s.connection() as client:
        client.post("/v1/completions", asked)
        for number in range(5):
            await s.stage.gate.step()
            event = (await client.event())["choices"][0]
            assert len(event["token_ids"]) == 1
            assert (event["finish_reason"] is not None) == (number == 4)
            assert ("prompt_token_ids" in event) == (number == 0)
        assert await client.event() is None
    s.stage.gate.open()
    await s.check_clean()


async def test_a_stream_ends_with_its_usage_where_it_was_asked_for(served: Any) -> None:
    s = await served(block_size=4)
    answer = await s.complete([prompt_of(9, 1), prompt_of(7, 2)], 4, n=2, stream=True, stream_options={"include_usage": True})
    *events, usage, done = events_of(answer)
    assert done == "[DONE]"
    assert usage["choices"] == []
    expected = {"prompt_tokens": 16, "completion_tokens": 16, "total_tokens": 32}
    assert usage["usage"] == {**expected, "prompt_tokens_details": {"cached_tokens": 0}}
    assert {event["usage"] for event in events} == {None}
    whole = await s.complete([prompt_of(9, 1), prompt_of(7, 2)], 4, n=2)
    assert whole.json()["usage"] == {**expected, "prompt_tokens_details": {"cached_tokens": 14}}
    await s.check_clean()


async def test_a_refusal_among_several_prompts_refuses_the_request(served: Any) -> None:
    s = await served(block_size=4)
    for stream in (False, True):
        error = error_of(await s.complete([prompt_of(5), [5, 999], prompt_of(6)], stream=stream), 400)
        assert "999" in error["message"]
    await s.check_clean()


async def test_priorities_and_traces_reach_the_engine(served: Any) -> None:
    s = await served(block_size=4)
    seen: list[Any] = []
    generate = s.engine.generate

    def watched(*arguments: Any, **fields: Any) -> Any:
        seen.append(fields)
        return generate(*arguments, **fields)

    s.engine.generate = watched
    headers = {"traceparent": "00-1-2-01", "tracestate": "a=b"}
    envelope = {"priority": -3, "tenant": "t", "cache_salt": "s"}
    await s.http.post("/v1/completions", json={"prompt": "x", **envelope}, headers=headers)
    assert seen == [{**envelope, "trace_context": headers}]
    await s.check_clean()


async def test_a_server_that_stops_lets_running_answers_end(stage: Any) -> None:
    s = await stage(block_size=4)
    import httpx2

    async with httpx2.AsyncClient() as http:
        async with serve_embedded(s.engine, grace_s=5) as url:
            s.gate.shut()
            body = {"prompt": prompt_of(9), "max_tokens": 5}
            asking = asyncio.ensure_future(http.post(f"{url}/v1/completions", json=body))
            await s.gate.arrival()
            s.gate.open()
        assert (await asking).status_code == 200
        with pytest.raises(httpx2.ConnectError):
            await http.get(f"{url}/health")
    await s.check_clean()


def _fail(step: Any) -> None:
    raise RuntimeError("the device is broken")
