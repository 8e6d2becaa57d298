"""A frontend that dies, hangs or does not read costs its own requests and nobody else's."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from repertory import EngineDeadError, SamplingParams
from repertory.actors.links import core_link
from repertory.protocol.outputs import EngineStats
from repertory.tests.engine.stage import greedy, last_of, prompt_of

from .conftest import Core, stats_until
from .reader import COMMAND, read_on

pytestmark = pytest.mark.alone

OpenCore = Callable[..., Any]
StartReader = Callable[..., Awaitable[Process]]
PATIENCE_S = 60.0
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, output_kind="delta")
LARGE = {"num_device_blocks": 40_000, "max_model_len": 4096}
"""No request of these tests ends by its length."""


@pytest.fixture
async def start_reader() -> AsyncIterator[StartReader]:
    """Starts frontends in processes of their own, which have had a token of each request when this returns."""
    async with AsyncExitStack() as stack:

        async def start(core: Core, how: str, num_requests: int = 3) -> Process:
            process = await asyncio.create_subprocess_exec(*COMMAND, core.endpoint, how, str(num_requests), stdout=PIPE)
            stack.push_async_callback(kill, process)
            assert process.stdout is not None
            assert await asyncio.wait_for(process.stdout.readline(), PATIENCE_S) == b"reading\n"
            return process

        yield start


async def kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def num_live(stats: EngineStats) -> int:
    return stats.num_running + stats.num_waiting + stats.num_preempted + stats.num_paused + stats.num_fetching


async def test_a_killed_frontends_requests_end_within_a_second(open_core: OpenCore, start_reader: StartReader) -> None:
    core: Core = await open_core(**LARGE)
    engine = await core.connect()
    reader = await start_reader(core, "reads", 5)
    mine = engine.generate(prompt_of(9, 50), ENDLESS)
    await anext(mine)
    assert num_live(await engine.stats()) >= 6
    reader.kill()
    assert await stats_until(engine, lambda stats: num_live(stats) == 1) < 1.5
    await anext(mine)
    await mine.aclose()
    assert await engine.audit() == []


async def test_a_frontend_that_is_killed_again_and_again_leaves_nothing(open_core: OpenCore, start_reader: StartReader) -> None:
    core: Core = await open_core(**LARGE)
    engine = await core.connect()
    for _ in range(3):
        reader = await start_reader(core, "reads", 2)
        reader.kill()
        await reader.wait()
    await stats_until(engine, lambda stats: num_live(stats) == 0)
    assert await engine.audit() == []
    await engine.reset_prefix_cache()
    assert (await engine.stats()).device_blocks.free == LARGE["num_device_blocks"]


async def test_a_stopped_frontend_is_given_up_after_its_timeout_and_told_so(
    open_core: OpenCore, start_reader: StartReader
) -> None:
    core: Core = await open_core(heartbeat_timeout_s=1.0, **LARGE)
    engine = await core.connect()
    reader = await start_reader(core, "reads")
    os.kill(reader.pid, signal.SIGSTOP)
    assert await stats_until(engine, lambda stats: num_live(stats) == 0) < 3.0
    os.kill(reader.pid, signal.SIGCONT)
    assert await asyncio.wait_for(reader.wait(), PATIENCE_S) == 1  # its streams raise that the core gave it up
    assert await engine.audit() == []


async def test_a_frontend_that_reads_none_of_its_streams_pauses_only_those(
    open_core: OpenCore, start_reader: StartReader
) -> None:
    core: Core = await open_core(credit_window=8, max_num_seqs=2, **LARGE)
    engine = await core.connect()
    await start_reader(core, "stops", 4)
    await stats_until(engine, lambda stats: stats.num_paused == 5)
    for seed in range(3):
        assert (await last_of(engine.generate(prompt_of(9, 60 + seed), greedy()))).finished
    assert (await engine.stats()).num_paused == 5


async def test_readers_that_never_read_are_ended_with_a_reason(open_core: OpenCore, start_reader: StartReader) -> None:
    core: Core = await open_core(credit_window=8, max_pause_s=0.5, **LARGE)
    engine = await core.connect()
    await start_reader(core, "stops", 2)
    await stats_until(engine, lambda stats: stats.num_paused == 3)
    assert await stats_until(engine, lambda stats: num_live(stats) == 0) < 3.0


async def test_a_frontend_whose_loop_hangs_does_not_hold_others_up(open_core: OpenCore, start_reader: StartReader) -> None:
    core: Core = await open_core(heartbeat_timeout_s=2.0, **LARGE)
    engine = await core.connect()
    await start_reader(core, "hangs", 1)
    started = time.monotonic()
    for seed in range(5):
        assert (await last_of(engine.generate(prompt_of(9, 60 + seed), greedy()))).finished
    assert time.monotonic() - started < 1.0
    await stats_until(engine, lambda stats: num_live(stats) == 0)
    assert await engine.audit() == []


async def test_the_core_of_two_frontends_that_come_and_go_forgets_them(open_core: OpenCore) -> None:
    core: Core = await open_core()
    engine = await core.connect()
    for _ in range(5):
        other = await core.connect()
        stream = other.generate(prompt_of(9), ENDLESS)
        await anext(stream)
        await other.aclose()
        with pytest.raises(EngineDeadError):
            await read_on(stream)
    await stats_until(engine, lambda stats: num_live(stats) == 0)
    assert await engine.audit() == []


def test_the_limit_of_unread_bytes_is_one_that_a_machine_can_bear() -> None:
    assert 1 << 20 <= core_link.MAX_UNREAD_BYTES <= 1 << 28
