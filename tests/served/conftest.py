"""Core hosts and servers as real processes, and the look at what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from repertory.actors.frontends.remote import RemoteEngine, connect
from repertory.actors.serving.child import Child
from repertory.actors.serving.lines import CoreOrders
from repertory.actors.serving.server import CORE_COMMAND, private_endpoint
from repertory.protocol.config import EngineConfig
from repertory.protocol.outputs import EngineStats

from .servers import Server

GONE_WITHIN_S = 10.0
STARTS_WITHIN_S = 30.0
PATIENCE_S = 60.0
SIMULATED = {"device": "simulated", "block_size": 4, "num_device_blocks": 256, "heartbeat_timeout_s": 5.0}
ENDLESS = {"num_device_blocks": 100_000, "credit_window": 64}
"""With these a request can go on for as long as a test needs."""
COMPUTED = {**SIMULATED, "device": "cpu", "dtype": "float32", "num_threads": 1}

StartServer = Callable[..., Any]


class Core:
    """A core host, and frontends of it in this process."""

    def __init__(self, endpoint: str, config: EngineConfig, command: Sequence[str], stack: AsyncExitStack) -> None:
        self.endpoint = endpoint
        self.config = config
        self._command = command
        self._stack = stack
        self.ends: list[asyncio.Task[str]] = []

    async def start(self) -> Child:
        """Start a life of it, and wait until it serves."""
        orders = CoreOrders(self.endpoint, self.config)
        self.child = Child(self._command, orders, patience_s=3600.0)
        await self.child.start()
        end = asyncio.ensure_future(self.child.ended())
        self.ends.append(end)
        await asyncio.wait([end, self.child.ready], timeout=STARTS_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        assert self.child.ready.done(), end.result() if end.done() else "it did not start"
        return self.child

    async def connect(self, **options: Any) -> RemoteEngine:
        """One more frontend."""
        return await self._stack.enter_async_context(connect(self.endpoint, **options))

    @property
    def pid(self) -> int:
        """The process of its present life."""
        assert self.child.pid is not None
        return self.child.pid

    @property
    def device_pid(self) -> int:
        """The process of its device's present life."""
        (device,) = psutil.Process(self.pid).children()
        return device.pid

    async def close(self) -> None:
        """End it, in whatever state it is."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        for end in self.ends:
            if not end.done():
                end.cancel()
        await asyncio.gather(*self.ends, return_exceptions=True)


async def stats_until(engine: RemoteEngine, condition: Callable[[EngineStats], bool]) -> float:
    """Ask for statistics until they are so; seconds that took."""
    started = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        while not condition(await engine.stats()):  # noqa: ASYNC110 - facts of another process
            await asyncio.sleep(0.005)
    return time.monotonic() - started


OpenCore = Callable[..., Any]


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The folder in which every private folder of the test is made: a short name, since sockets have a limit."""
    folder = tempfile.mkdtemp(prefix="se-")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield Path(folder)
    shutil.rmtree(folder)


@pytest.fixture
async def nothing_left(sockets: Path) -> AsyncIterator[None]:
    """Afterwards no process of the test is left, and no socket or folder of one."""
    yield
    me = psutil.Process()
    async with asyncio.timeout(GONE_WITHIN_S):
        while me.children(recursive=True) or os.listdir(sockets) or _ours(sockets):  # noqa: ASYNC110 - facts of others
            await asyncio.sleep(0.02)


def _ours(sockets: Path) -> list[int]:
    """Processes, whoever's children they are by now, that were started with this test's temporary folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("TMPDIR") == str(sockets):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@pytest.fixture
async def open_core(paper_model: Path, tiny_model: Path, nothing_left: None, log_lines: list[dict]) -> AsyncIterator[OpenCore]:
    """Opens core hosts: `open_core(credit_window=8, ...)`; `device="cpu"` computes the tiny model."""
    async with AsyncExitStack() as stack:

        async def open_one(command: Sequence[str] = CORE_COMMAND, **settings: Any) -> Core:
            is_computed = settings.get("device") == "cpu"
            model = tiny_model if is_computed else paper_model
            config = EngineConfig(model=str(model), **{**(COMPUTED if is_computed else SIMULATED), **settings})
            endpoint = stack.enter_context(private_endpoint())
            core = Core(endpoint, config, command, stack)
            stack.push_async_callback(core.close)
            await core.start()
            return core

        yield open_one


@pytest.fixture
async def start_server(paper_model: Path, tiny_model: Path, nothing_left: None) -> AsyncIterator[StartServer]:
    """Starts servers: `start_server(frontends=2, drain_s=1.0, ...)`. Afterwards nothing of any of them may be left."""
    async with AsyncExitStack() as stack:

        async def start(*, drain_s: float = 20.0, kind: str = "sound", **settings: Any) -> Server:
            is_computed = settings.get("device") == "cpu"
            model = tiny_model if is_computed else paper_model
            defaults = {"model": str(model), "port": 0, "frontends": 1, **(COMPUTED if is_computed else SIMULATED | ENDLESS)}
            server = await Server.start(EngineConfig(**{**defaults, **settings}), drain_s=drain_s, kind=kind)
            stack.push_async_callback(server.close)
            return server

        yield start


@pytest.fixture
def until() -> Callable[..., Any]:
    """Waits for a fact that nothing announces."""

    async def wait(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.005)

    return wait
