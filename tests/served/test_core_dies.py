"""25. A core that is killed, hangs or gives up: every client hears of it within a bound, and a new core serves again.

Bounds: 2 s after a kill, `heartbeat_timeout_s` + 2 s after a hang.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from repertory import EngineDeadError, EngineStats, RequestStream, SamplingParams
from repertory.actors.frontends.remote import RemoteEngine
from repertory.tests.engine.stage import greedy, last_of, prompt_of
from repertory.tests.supervision.crowd import alone, begin, crowd, results
from repertory.tests.supervision.faulty_host import VARIABLE, Fault, Plan

from . import faulty_core
from .conftest import SIMULATED, Core, stats_until

pytestmark = pytest.mark.alone

OpenCore = Callable[..., Any]
Until = Callable[..., Any]
SILENCE_S = 1.0
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, output_kind="delta")
LARGE = {"num_device_blocks": 40_000, "credit_window": 64}


async def three_in_flight(engine: RemoteEngine) -> list[RequestStream]:
    streams = [engine.generate(prompt_of(9, seed), ENDLESS) for seed in range(3)]
    for stream in streams:
        await anext(stream)
    return streams


async def check_lost(engine: RemoteEngine, streams: list[RequestStream], *, within_s: float, why: str) -> None:
    """Every client hears of it in time, what comes then is refused at once, and no future is left."""
    started = time.monotonic()

    async def drain(stream: RequestStream) -> None:
        async for _ in stream:
            pass

    asking = asyncio.ensure_future(engine.stats())
    async with asyncio.timeout(within_s + 5.0):
        *ends, asked = await asyncio.gather(*map(drain, streams), asking, return_exceptions=True)
    assert isinstance(asked, EngineStats | EngineDeadError), "answered before, or not at all"
    assert time.monotonic() - started < within_s
    for end in ends:
        assert isinstance(end, EngineDeadError)
        assert why in str(end)
    started = time.monotonic()
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    with pytest.raises(EngineDeadError):
        engine.generate("hello")
    await engine.abort("whatever")
    assert time.monotonic() - started < 1.0, "nothing waits for the dead core"


async def serves_again(engine: RemoteEngine, until: Until) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await engine.check_health()
            except EngineDeadError:
                await asyncio.sleep(0.01)
            else:
                break
    assert (await last_of(engine.generate(prompt_of(9), greedy()))).finished
    assert await engine.audit() == []


async def test_a_killed_core_is_seen_at_once_and_its_successor_serves(open_core: OpenCore, until: Until) -> None:
    core: Core = await open_core(**LARGE)
    first, second = await core.connect(), await core.connect()
    streams = await three_in_flight(first)
    others = await three_in_flight(second)
    os.kill(core.pid, signal.SIGKILL)
    await asyncio.gather(
        check_lost(first, streams, within_s=2.0, why="process has ended"),
        check_lost(second, others, within_s=2.0, why="process has ended"),
    )
    await core.start()
    for engine in (first, second):
        await serves_again(engine, until)


async def test_a_stopped_core_is_seen_within_its_timeout_and_2_seconds(open_core: OpenCore, until: Until) -> None:
    core: Core = await open_core(heartbeat_timeout_s=SILENCE_S, **LARGE)
    engine = await core.connect()
    streams = await three_in_flight(engine)
    os.kill(core.pid, signal.SIGSTOP)
    await check_lost(engine, streams, within_s=SILENCE_S + 2.0, why="silent")
    os.kill(core.pid, signal.SIGCONT)  # it was only resting: it serves again, and what it had is gone
    await serves_again(engine, until)


async def test_tokens_that_came_before_the_loss_are_still_read(open_core: OpenCore) -> None:
    core: Core = await open_core(num_device_blocks=40_000, credit_window=16)
    engine = await core.connect()
    stream = engine.generate(prompt_of(9), ENDLESS)
    await stats_until(engine, lambda stats: stats.num_paused == 1)
    os.kill(core.pid, signal.SIGKILL)
    await core.ends[0]
    num_tokens = 0

    async def drain() -> None:
        nonlocal num_tokens
        async for output in stream:
            num_tokens += len(output.outputs[0].token_ids)

    with pytest.raises(EngineDeadError):
        await drain()
    assert num_tokens == 16


async def test_a_core_whose_device_dies_for_good_says_why(open_core: OpenCore) -> None:
    core: Core = await open_core(max_restarts=0, **LARGE)
    engine = await core.connect()
    streams = await three_in_flight(engine)
    os.kill(core.device_pid, signal.SIGKILL)
    await check_lost(engine, streams, within_s=2.0, why="SIGKILL")
    assert "SIGKILL" in await asyncio.wait_for(core.ends[0], 60)


async def test_a_killed_device_is_a_pause_to_every_frontend(open_core: OpenCore, paper_model: Path, until: Until) -> None:
    core: Core = await open_core(max_num_seqs=8)
    requests = crowd(60, max_tokens=60)
    expected = await alone(paper_model, requests, **SIMULATED)
    first, second = await core.connect(), await core.connect()
    tasks = begin(first, requests[::2]), begin(second, requests[1::2])
    await stats_until(first, lambda stats: stats.num_steps >= 20)
    os.kill(core.device_pid, signal.SIGKILL)
    assert await results(tasks[0]) == expected[::2]
    assert await results(tasks[1]) == expected[1::2]
    assert (await first.stats()).num_restarts == 1
    assert await first.audit() == []
    assert await second.audit() == []


async def test_a_device_that_dies_in_every_way_is_a_pause_to_every_frontend(
    open_core: OpenCore, paper_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = [("kill", "before"), ("stop", "during"), ("raise", "after"), ("exit", "during")]
    faults = [Fault(how, when, life=life, step=3 + life) for life, (how, when) in enumerate(ways, 1)]  # type: ignore[arg-type]
    (tmp_path / "plan").write_bytes(msgspec.json.encode(Plan(faults)))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "plan"))
    requests = crowd(30)
    expected = await alone(paper_model, requests, **SIMULATED)
    core: Core = await open_core(faulty_core.COMMAND, max_num_seqs=8, heartbeat_timeout_s=0.5)
    first, second = await core.connect(), await core.connect()
    tasks = begin(first, requests[::2]), begin(second, requests[1::2])
    assert await results(tasks[0]) == expected[::2]
    assert await results(tasks[1]) == expected[1::2]
    assert (await first.stats()).num_restarts == 4
    assert await first.audit() == []


async def test_a_frontend_may_come_before_its_core(open_core: OpenCore) -> None:
    core: Core = await open_core()
    os.kill(core.pid, signal.SIGKILL)
    await core.ends[0]
    coming = asyncio.ensure_future(core.connect(timeout_s=None))
    await asyncio.sleep(0.2)
    assert not coming.done()
    await core.start()
    engine = await asyncio.wait_for(coming, 60)
    assert (await last_of(engine.generate(prompt_of(9), greedy()))).finished
