"""`connect`: the API of an engine, over a link to a core in another process."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from repertory import (
    BeamSearchParams,
    ConfigError,
    Engine,
    EngineDeadError,
    EngineDrainingError,
    NeverFitsError,
    QueueFullError,
    SamplingParams,
    StructuredOutputs,
    ValidationError,
    connect,
)
from repertory.tests.engine.stage import greedy, last_of, prompt_of
from repertory.tests.supervision.crowd import alone, begin, crowd, read, results

from .conftest import COMPUTED, SIMULATED, Core

pytestmark = pytest.mark.alone

OpenCore = Callable[..., Any]
Until = Callable[..., Any]
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, output_kind="delta")


async def test_two_frontends_get_what_each_request_gives_alone(open_core: OpenCore, paper_model: Path) -> None:
    core: Core = await open_core(max_num_seqs=8)
    first, second = await core.connect(), await core.connect()
    requests = crowd(40)
    expected = await alone(paper_model, requests, **SIMULATED)
    tasks = begin(first, requests[::2]), begin(second, requests[1::2])
    found = [await results(part) for part in tasks]
    assert found[0] == expected[::2]
    assert found[1] == expected[1::2]
    assert await first.audit() == []
    assert await second.audit() == []


async def test_what_a_frontend_computes_equals_an_embedded_engine(open_core: OpenCore, tiny_model: Path) -> None:
    core: Core = await open_core(device="cpu")
    engine = await core.connect()
    params = [
        SamplingParams(temperature=0.8, seed=3, max_tokens=12, n=3, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=12, logit_bias={5: 3.0}, bad_words=["the"], min_tokens=4),
        SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputs(choice=["yes", "no"])),
    ]
    beams = BeamSearchParams(beam_width=12, max_tokens=4)
    async with Engine(model=str(tiny_model), **COMPUTED) as embedded:
        for one in params:
            expected, found = [await last_of(face.generate("hello there", one)) for face in (embedded, engine)]
            expected.request_id, expected.metrics = found.request_id, found.metrics
            assert msgspec.to_builtins(found) == msgspec.to_builtins(expected)
        assert await engine.beam_search("hello there", beams) == await embedded.beam_search("hello there", beams)
    assert await engine.audit() == []


async def test_the_facts_of_the_core_are_there(open_core: OpenCore) -> None:
    core: Core = await open_core(api_key="secret", max_num_seqs=7)
    engine = await core.connect()
    assert engine.capacity.num_device_blocks == 256
    assert engine.has_chat_template
    assert engine.tokenizer.encode("the").ids
    assert (engine.config.max_num_seqs, engine.config.api_key) == (7, None)
    await engine.check_health()
    await last_of(engine.generate(prompt_of(12), greedy()))
    stats = await engine.stats()
    assert stats.num_steps >= 5
    assert stats.device_blocks.cached > 0
    await engine.reset_prefix_cache()
    assert (await engine.stats()).device_blocks.cached == 0


async def test_a_configuration_of_its_own_keeps_its_secrets(open_core: OpenCore) -> None:
    core: Core = await open_core(api_key="secret")
    engine = await core.connect(config=core.config)
    assert engine.config.api_key == "secret"


async def test_the_same_label_in_two_frontends_is_two_requests(open_core: OpenCore, until: Until) -> None:
    core: Core = await open_core()
    first, second = await core.connect(), await core.connect()
    one, other = (engine.generate(prompt_of(9), ENDLESS, "same") for engine in (first, second))
    await anext(one)
    await anext(other)
    await first.abort("same")
    ends = [output async for output in one]
    assert ends[-1].outputs[0].finish_reason == "abort"
    await anext(other)
    assert (await second.stats()).num_running == 1
    await other.aclose()
    assert await second.audit() == []


async def test_an_abort_reaches_the_core_from_every_way_of_leaving(open_core: OpenCore) -> None:
    core: Core = await open_core(max_num_seqs=1)
    engine = await core.connect()
    streams = [engine.generate(prompt_of(9, seed), ENDLESS) for seed in range(4)]
    await anext(streams[0])
    reading = asyncio.ensure_future(anext(streams[1]))
    await asyncio.sleep(0)
    reading.cancel()
    await streams[0].aclose()
    await streams[2].aclose()
    del streams
    gc.collect()
    async with asyncio.timeout(60):
        while (await engine.stats()).num_running or (await engine.stats()).num_waiting:
            pass
    assert await engine.audit() == []


async def test_refusals_come_from_where_they_are_found(open_core: OpenCore) -> None:
    core: Core = await open_core(max_num_queued=1, max_num_seqs=1)
    engine = await core.connect()
    with pytest.raises(ValidationError, match="temperature"):
        await last_of(engine.generate("hello", SamplingParams(temperature=-1)))
    with pytest.raises(NeverFitsError, match="tokens"):
        await last_of(engine.generate(prompt_of(2000), greedy()))
    with pytest.raises(ValidationError, match="cannot be sent to the core"):
        await last_of(engine.generate("hello", greedy(), "half \ud800 a pair"))
    streams = [engine.generate(prompt_of(9, seed), ENDLESS) for seed in range(4)]
    for stream in streams[2:]:
        with pytest.raises(QueueFullError, match="max_num_queued"):
            await anext(stream)
    for stream in streams:
        await stream.aclose()
    assert (await last_of(engine.generate("hello", greedy()))).finished
    assert await engine.audit() == []


async def test_draining_finishes_what_runs_and_refuses_everybody_elses(open_core: OpenCore) -> None:
    core: Core = await open_core()
    first, second = await core.connect(), await core.connect()
    running = asyncio.ensure_future(
        read(second.generate(prompt_of(9), SamplingParams(max_tokens=2000, ignore_eos=True, output_kind="delta")))
    )
    while not (await first.stats()).num_running:
        pass
    assert await first.drain(timeout_s=20)
    assert (await running).finish_reason == "length"
    for engine in (first, second):
        with pytest.raises(EngineDrainingError):
            await last_of(engine.generate("hello", greedy()))


async def test_draining_has_a_deadline(open_core: OpenCore) -> None:
    core: Core = await open_core(credit_window=8)
    engine = await core.connect()
    stream = engine.generate(prompt_of(9), ENDLESS)
    await anext(stream)
    started = time.monotonic()
    assert not await engine.drain(timeout_s=0.2)
    assert time.monotonic() - started < 2
    await stream.aclose()


async def test_an_actor_of_a_frontend_that_crashes_is_not_noticed(open_core: OpenCore, paper_model: Path) -> None:
    core: Core = await open_core(max_num_seqs=8)
    engine, other = await core.connect(), await core.connect()
    requests = crowd(20)
    expected = await alone(paper_model, requests, **SIMULATED)
    half = engine._living()
    crashes = iter([5, 17])
    crash_at, num_calls = next(crashes), 0
    really = half.detokenizer._handle

    async def handle(message: Any) -> None:
        nonlocal crash_at, num_calls
        num_calls += 1
        if num_calls == crash_at:
            crash_at = next(crashes, 0)
            raise ZeroDivisionError("in the detokenizer")
        await really(message)

    half.detokenizer._handle = handle  # type: ignore[method-assign]
    tasks = begin(engine, requests[:10]), begin(other, requests[10:])
    assert [*await results(tasks[0]), *await results(tasks[1])] == expected
    assert crash_at == 0, "it has crashed twice"
    assert await engine.audit() == []
    assert await other.audit() == []


async def test_the_prompt_and_its_ids_are_told(open_core: OpenCore) -> None:
    core: Core = await open_core()
    engine = await core.connect()
    output = await last_of(engine.generate([{"role": "user", "content": "hello"}], greedy()))
    assert output.prompt is not None
    assert "hello" in output.prompt
    assert output.prompt_token_ids == engine.tokenizer.encode(output.prompt, add_special_tokens=False).ids


async def test_nobody_at_the_endpoint_is_said_within_the_time(sockets: Path) -> None:
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"no core answers at .*: waited 0.3 s"):
        async with connect(f"ipc://{sockets}/nobody", timeout_s=0.3):
            pass
    assert time.monotonic() - started < 2


async def test_an_endpoint_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="ipc://PATH"):
        connect("tcp://10.0.0.1:5555")


async def test_an_engine_that_was_closed_says_so(open_core: OpenCore) -> None:
    core: Core = await open_core()
    engine = await core.connect()
    stream = engine.generate(prompt_of(9), ENDLESS)
    await anext(stream)
    await engine.aclose()
    with pytest.raises(EngineDeadError, match="closed"):
        async for _ in stream:
            pass
    with pytest.raises(EngineDeadError, match="closed"):
        engine.generate("hello")
    with pytest.raises(EngineDeadError, match="closed"):
        await engine.check_health()
    other = await core.connect()
    async with asyncio.timeout(60):
        while (await other.stats()).num_running:
            pass
    assert await other.audit() == []
