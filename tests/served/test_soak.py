"""Thirty thousand short requests, with aborts, disconnects and slow readers: nothing of them is left behind.

Core, link, two frontends and an HTTP server run in this process, joined by the same sockets as when each has its own, so that
one look sees every object of all of them; only the device is elsewhere. What a process keeps on purpose (the last 4,096 ids
that have ended, say) is full after the warm-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
import uvicorn

from repertory import SamplingParams, connect
from repertory.actors.core_host import serve_core
from repertory.actors.frontends.remote import RemoteEngine
from repertory.actors.serving.lines import CoreOrders, Ready, ToParent
from repertory.actors.serving.server import listen_on, private_endpoint
from repertory.protocol.config import EngineConfig
from repertory.tests.engine.stage import LETTERS

from .plain_frontend import make_app

NUM_REQUESTS = 30_000
NUM_WARM = 12_000
AT_ONCE = 48
LIMIT_BYTES_PER_REQUEST = 102.4
"""Of resident memory: what is aimed at, and printed."""
KINDS = ["read", "read", "read", "sampled", "abort", "drop", "label", "slow", "http", "http drop"]

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(1200)]


class Nobody:
    """A parent that is told when the core serves."""

    def __init__(self) -> None:
        self.is_ready = asyncio.Event()

    def say(self, message: ToParent) -> None:
        if isinstance(message, Ready):
            self.is_ready.set()


class House:
    """Two frontends of a core, and the address of an HTTP server in front of the second."""

    def __init__(self, engines: list[RemoteEngine], port: int) -> None:
        self.engines = engines
        self.port = port


@asynccontextmanager
async def whole_house(config: EngineConfig) -> AsyncIterator[House]:
    """Everything that serves, in this process."""
    async with AsyncExitStack() as stack:
        endpoint = stack.enter_context(private_endpoint())
        parent = Nobody()
        core = asyncio.ensure_future(serve_core(CoreOrders(endpoint, config), parent))  # type: ignore[arg-type]
        stack.push_async_callback(cancelled, core)
        await asyncio.wait([core, asyncio.ensure_future(parent.is_ready.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert not core.done(), core.result()
        engines = [await stack.enter_async_context(connect(endpoint)) for _ in range(2)]
        listener = stack.enter_context(listen_on("127.0.0.1", 0))
        app = make_app(engines[1], is_draining=lambda: False)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, ws="none", lifespan="off"))
        serving = asyncio.ensure_future(server._serve([listener]))
        try:
            yield House(engines, listener.getsockname()[1])
        finally:
            server.should_exit = True
            await serving


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def one_request(house: House, kind: str, draw: random.Random) -> None:
    """A short request of one kind, to its end, whatever that is."""
    engine = draw.choice(house.engines)
    prompt = draw.choices(LETTERS, k=draw.randint(1, 24))
    if kind.startswith("http"):
        await over_http(house.port, prompt, is_dropped=kind == "http drop")
        return
    params = SamplingParams(
        temperature=1.0 if kind == "sampled" else 0.0,
        n=2 if kind == "sampled" else 1,
        max_tokens=draw.randint(1, 8),
        logprobs=2 if kind == "sampled" else None,
        stop=["e"] if kind == "sampled" else None,
        output_kind=draw.choice(["delta", "cumulative"]),
    )
    stream = engine.generate(prompt, params, "same label" if kind == "label" else None)
    if kind == "drop":
        return  # the last reference goes with this call
    async with stream:
        if kind == "label":
            await engine.abort("same label")
        async for _ in stream:
            if kind == "abort":
                return
            if kind == "slow":
                await asyncio.sleep(0.01)


async def over_http(port: int, prompt: list[int], *, is_dropped: bool) -> None:
    """A request on a connection of its own, which is cut after the first bytes of the answer where it is dropped."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": prompt, "max_tokens": 200 if is_dropped else 5}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    await (reader.read(200) if is_dropped else reader.read(-1))
    if is_dropped:
        writer.transport.abort()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def run(house: House, count: int, draw: random.Random) -> None:
    """Many requests, some at a time."""
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await one_request(house, draw.choice(KINDS), draw)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))


async def rest(house: House) -> None:
    """Nothing runs, nothing is cached."""
    for engine in house.engines:
        async with asyncio.timeout(30):
            while (stats := await engine.stats()).num_running or stats.num_waiting:  # noqa: ASYNC110 - facts of the core
                await asyncio.sleep(0.01)
        assert await engine.audit() == []
        await engine.reset_prefix_cache()


def census() -> Counter[str]:
    """Live objects that the collector knows, by type. Of ours, and what ours hold."""
    gc.collect()
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


def spare(name: str) -> int:
    """How many more of a type there may be: none of ours; a turn of the event loop's worth of Python's own."""
    return 0 if name.startswith("repertory.") else 30  # a thousandth of the requests


async def test_nothing_of_many_requests_is_left(paper_model: Path, nothing_left: None) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    config = EngineConfig(
        model=str(paper_model), device="simulated", block_size=4, num_device_blocks=512, credit_window=4, max_num_seqs=32
    )
    draw = random.Random(1)
    before: Counter[str] = Counter()  # here, so that it is counted both times
    me = psutil.Process()
    try:
        async with whole_house(config) as house:
            await run(house, NUM_WARM, draw)
            await rest(house)
            before.update(census())
            resident = [me.memory_info().rss]
            for _ in range(3):
                await run(house, NUM_REQUESTS // 3, draw)
                await rest(house)
                resident.append(me.memory_info().rss)
            after = census()
            slope = (resident[3] - resident[1]) / (NUM_REQUESTS * 2 / 3)
            aim = f"aim: under {LIMIT_BYTES_PER_REQUEST:g}"
            print(f"\nsoak: resident memory grew by {slope:.1f} bytes a request ({aim})")  # noqa: T201 - it is asked for
            stats = await house.engines[0].stats()
            assert stats.device_blocks.free == stats.device_blocks.total
        grown = {name: (before[name], count) for name, count in after.items() if count > before[name] + spare(name)}
        assert not grown, f"types of which there are more than after the warm-up: {grown}"
    finally:
        structlog.reset_defaults()
