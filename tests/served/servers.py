"""A running server as a test sees it: a process, a URL, and log lines."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
import psutil

from repertory.protocol.config import EngineConfig

from .plain_server import COMMAND

STARTS_WITHIN_S = 40.0
PATIENCE_S = 60.0


class Server:
    """`process` and what it has said so far."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self.words = ""
        self.url = self.endpoint = ""
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, config: EngineConfig, *, drain_s: float = 20.0, kind: str = "sound") -> Server:
        """Start one, and wait until it serves or has ended."""
        arguments = msgspec.json.encode(config).decode(), str(drain_s), kind
        process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=PIPE, stderr=PIPE, limit=1 << 24)
        server = cls(process)
        assert process.stdout is not None
        announced = (await asyncio.wait_for(process.stdout.readline(), STARTS_WITHIN_S)).decode()
        if found := re.fullmatch(r"serving at (http://\S+) \(Python: repertory.connect\('(ipc://\S+)'\)\)\n", announced):
            server.url, server.endpoint = found.groups()
        return server

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.words += line.decode()
            if line.startswith(b"{"):
                self.lines.append(json.loads(line))

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its log lines of that event so far."""
        return [line for line in self.lines if line["event"] == name]

    async def event(self, name: str, number: int = 1) -> dict[str, Any]:
        """Wait for the `number`th line of that event."""
        await until(lambda: len(self.events(name)) >= number)
        return self.events(name)[number - 1]

    @property
    def core(self) -> psutil.Process:
        """The core host that lives now."""
        return self._child("core_host", "faulty_core")

    @property
    def device(self) -> psutil.Process:
        """The device host that lives now."""
        (device,) = self.core.children()
        return device

    @property
    def frontends(self) -> list[psutil.Process]:
        """The frontend hosts that live now."""
        return [child for child in psutil.Process(self.process.pid).children() if "plain_frontend" in " ".join(child.cmdline())]

    def _child(self, *names: str) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        (found,) = [child for child in children if any(name in " ".join(child.cmdline()) for name in names)]
        return found

    @property
    def everybody(self) -> list[psutil.Process]:
        """All its processes."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal and wait for its end; the exit status."""
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """Wait for its end; the exit status."""
        status = await asyncio.wait_for(self.process.wait(), PATIENCE_S)
        await asyncio.wait_for(self._reading, PATIENCE_S)
        return status

    async def close(self) -> None:
        """End it in whatever state it is."""
        if self.process.returncode is None:
            for process in self.everybody:
                process.resume()
            await self.end()

    # ---- a client -------------------------------------------------------------------------------

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx2.AsyncClient]:
        """Connections of one client. Each request has its own: so they reach every frontend."""
        limits = httpx2.Limits(max_keepalive_connections=0)
        async with httpx2.AsyncClient(base_url=self.url, timeout=PATIENCE_S, limits=limits) as client:
            yield client

    async def generate(self, client: httpx2.AsyncClient, prompt: Any, max_tokens: int | None) -> tuple[list[int], str]:
        """The token ids of an answer and its last line."""
        async with client.stream("POST", "/generate", json={"prompt": prompt, "max_tokens": max_tokens}) as response:
            if response.status_code != 200:
                return [], f"status {response.status_code}"
            token_ids: list[int] = []
            last = "cut"
            try:
                async for line in response.aiter_lines():
                    if line.startswith("["):
                        token_ids += json.loads(line)
                    else:
                        last = line
            except httpx2.HTTPError:
                last = "cut"
            return token_ids, last

    async def audit(self, client: httpx2.AsyncClient) -> list[str]:
        """What any of its frontends, or its core, finds that does not add up."""
        found: dict[int, list[str]] = {}
        async with asyncio.timeout(PATIENCE_S):
            while len(found) < len(self.frontends):
                for response in await asyncio.gather(*(client.get("/audit") for _ in range(8))):
                    found[response.json()["pid"]] = response.json()["problems"]
        return [problem for problems in found.values() for problem in problems]

    async def status(self, client: httpx2.AsyncClient, path: str = "/health") -> int:
        """Of a GET."""
        return (await client.get(path)).status_code


async def until(condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    """Wait for a fact that nothing announces."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)
