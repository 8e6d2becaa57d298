"""25. When the engine is lost for good, every client gets an error within a bound, new requests at once, and nobody waits.

What computes may be killed or hang, and then it is replaced; this is about what happens when it is not, or when an actor
that cannot be replaced fails. Bounds: 2 s after a kill, `heartbeat_timeout_s` + 2 s after a hang.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from repertory import Engine, EngineDeadError, RequestStream, SamplingParams
from repertory.tests.engine.stage import prompt_of, until

pytestmark = pytest.mark.alone

ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
SILENCE_S = 1.0

OpenEngine = Callable[..., Awaitable[Engine]]


@pytest.fixture
async def open_engine(paper_model: Path, log_lines: list[dict]) -> AsyncIterator[OpenEngine]:
    """Opens engines whose device is a process, and is not replaced. It never runs out of tokens to give."""
    async with AsyncExitStack() as stack:

        async def open_one(**settings: Any) -> Engine:
            defaults = {"device": "simulated", "max_restarts": 0, "heartbeat_timeout_s": SILENCE_S, "num_device_blocks": 4096}
            engine = Engine(model=str(paper_model), credit_window=64, **{**defaults, **settings})
            stack.push_async_callback(engine.aclose)
            await engine.start()
            return engine

        yield open_one


async def three_in_flight(engine: Engine) -> list[RequestStream]:
    """Three requests, each of which has had a token."""
    streams = [engine.generate(prompt_of(9, seed), ENDLESS) for seed in range(3)]
    for stream in streams:
        await anext(stream)
    return streams


async def check_lost(engine: Engine, streams: list[RequestStream], *, within_s: float, why: str) -> None:
    """Every client hears of it in time, what comes then is refused at once, and no future is left."""
    started = time.monotonic()

    async def drain(stream: RequestStream) -> None:
        async for _ in stream:
            pass

    async with asyncio.timeout(within_s + 5.0):
        ends = await asyncio.gather(*map(drain, streams), return_exceptions=True)
    assert time.monotonic() - started < within_s
    for end in ends:
        assert isinstance(end, EngineDeadError)
        assert why in str(end)
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match=why):
        await engine.check_health()
    with pytest.raises(EngineDeadError, match=why):
        engine.generate("hello")
    assert time.monotonic() - started < 1.0, "at once"
    assert len(engine._company.dispatcher) == 0
    assert engine._task.done()


async def test_a_killed_device_process_is_seen_within_2_seconds(open_engine: OpenEngine) -> None:
    engine = await open_engine()
    streams = await three_in_flight(engine)
    os.kill(engine._company.keeper._device.pid, signal.SIGKILL)
    await check_lost(engine, streams, within_s=2.0, why="SIGKILL")


async def test_a_hanging_device_process_is_seen_within_its_timeout_and_2_seconds(open_engine: OpenEngine) -> None:
    engine = await open_engine()
    streams = await three_in_flight(engine)
    os.kill(engine._company.keeper._device.pid, signal.SIGSTOP)
    await check_lost(engine, streams, within_s=SILENCE_S + 2.0, why="silent")


async def test_requests_that_only_wait_hear_of_it_too(open_engine: OpenEngine) -> None:
    engine = await open_engine(max_num_seqs=1)
    first = engine.generate(prompt_of(9, 0), ENDLESS)
    await anext(first)
    waiting = [engine.generate(prompt_of(9, seed), ENDLESS) for seed in (1, 2)]
    await until(lambda: len(engine._company.scheduler.core.queues.waiting) == 2)
    os.kill(engine._company.keeper._device.pid, signal.SIGKILL)
    await check_lost(engine, [first, *waiting], within_s=2.0, why="SIGKILL")


async def test_requests_paused_by_their_readers_hear_of_it_when_they_read_on(open_engine: OpenEngine) -> None:
    engine = await open_engine()
    streams = await three_in_flight(engine)
    core = engine._company.scheduler.core
    await until(lambda: len(core.queues.paused) == 3)
    os.kill(engine._company.keeper._device.pid, signal.SIGKILL)
    await check_lost(engine, streams, within_s=2.0, why="SIGKILL")


@pytest.mark.parametrize("handler", ["_handle", "send_steps", "_send_on"])
async def test_a_scheduler_that_raises_with_a_request_in_its_hands_ends_everybody(
    open_engine: OpenEngine, handler: str
) -> None:
    engine = await open_engine()
    streams = await three_in_flight(engine)

    def raise_instead(*args: Any) -> None:
        raise ZeroDivisionError("between two queues")

    setattr(engine._company.scheduler, handler, raise_instead)
    streams.append(engine.generate(prompt_of(9, 3), ENDLESS))
    await check_lost(engine, streams, within_s=2.0, why="between two queues")


async def test_a_request_that_is_just_being_read_hears_of_it(open_engine: OpenEngine) -> None:
    engine = await open_engine()
    resolver, loop = engine._company.resolver, asyncio.get_running_loop()
    really, reading = resolver.resolve, asyncio.Event()

    def resolve(submit: Any) -> Any:
        loop.call_soon_threadsafe(reading.set)
        time.sleep(0.2)  # on the tokenizer's thread: the request is in no queue now
        return really(submit)

    resolver.resolve = resolve
    stream = engine.generate(prompt_of(9), ENDLESS)
    await reading.wait()
    os.kill(engine._company.keeper._device.pid, signal.SIGKILL)
    await check_lost(engine, [stream], within_s=2.0, why="SIGKILL")


async def test_a_delivery_that_raises_ends_everybody(open_engine: OpenEngine) -> None:
    engine = await open_engine()
    streams = await three_in_flight(engine)

    def raise_instead(message: Any) -> None:
        raise ZeroDivisionError("on the last metre")

    engine._company.dispatcher.on_text_out = raise_instead
    await check_lost(engine, streams, within_s=2.0, why="on the last metre")


async def test_the_application_goes_on_and_may_open_another_engine(open_engine: OpenEngine) -> None:
    engine = await open_engine()
    streams = await three_in_flight(engine)
    os.kill(engine._company.keeper._device.pid, signal.SIGKILL)
    await check_lost(engine, streams, within_s=2.0, why="SIGKILL")
    await engine.aclose()
    another = await open_engine()
    stream = another.generate(prompt_of(9), SamplingParams(temperature=0.0, max_tokens=3))
    outputs = [output async for output in stream]
    assert outputs[-1].finished
    assert await another.audit() == []
