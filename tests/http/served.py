"""A stage behind a real server and real sockets, on the test's own loop, and what a test asks of them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2

from repertory.actors.frontends.http.server import serve_embedded
from repertory.tests.engine.stage import PATIENCE_S, Stage, until


class Served:
    """`stage` is served at `url`. `http` is a client of it; `draining` may be set."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.engine = stage.engine
        self.url = ""
        self.draining = False
        self._open = asyncio.Event()
        self._end = asyncio.Event()
        # A task of its own: fixtures may begin and end in different ones.
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        served = serve_embedded(self.engine, is_draining=lambda: self.draining, grace_s=1, send_buffer_bytes=4096)
        async with served as self.url:
            self.http = httpx2.AsyncClient(base_url=self.url, timeout=10)
            self._open.set()
            await self._end.wait()
            await self.http.aclose()

    async def opened(self) -> Served:
        """Once it serves."""
        waiting = asyncio.ensure_future(self._open.wait())
        await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task.done():
            await self._task
        return self

    async def close(self) -> None:
        """Stop serving."""
        self._end.set()
        self.stage.gate.open()
        await self._task

    # ---- requests -----------------------------------------------------------------------------------

    async def complete(self, prompt: Any, max_tokens: int | None = 5, **fields: Any) -> httpx2.Response:
        """A greedy completion, with the ids of its tokens unless `fields` say otherwise."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **fields}
        return await self.http.post("/v1/completions", json=body)

    async def chat(self, messages: Any, **fields: Any) -> httpx2.Response:
        """A greedy chat."""
        return await self.http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **fields})

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection on which a test says byte for byte what it likes."""
        found = urlsplit(self.url)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # a client that does not read fills up soon
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (found.hostname, found.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 12)
        try:
            yield Connection(reader, writer)
        finally:
            writer.transport.abort()

    async def check_clean(self) -> None:
        """AUDIT, with every connection's task gone too."""
        await until(lambda: not self.num_answering)
        await self.stage.check_clean()

    @property
    def num_answering(self) -> int:
        """Requests that the server is answering."""
        return sum(task.get_coro().__qualname__.endswith("run_asgi") for task in asyncio.all_tasks())


class Connection:
    """One connection of a client that reads when it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def post(self, path: str, body: dict[str, Any], **headers: str) -> None:
        """Send a request; nothing is read."""
        content = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(content)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + content)

    async def line(self) -> str:
        """The next line."""
        async with asyncio.timeout(PATIENCE_S):
            return (await self.reader.readline()).decode().rstrip("\r\n")

    async def event(self) -> Any:
        """The next event of a stream; None at its end."""
        while True:
            line = await self.line()
            if line.startswith("data: "):
                return None if line == "data: [DONE]" else json.loads(line[6:])
            assert line or not self.reader.at_eof(), "the stream ended without an end"

    async def rest(self) -> bytes:
        """What still comes before the server closes, or breaks off."""
        found = bytearray()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while piece := await self.reader.read(65_536):
                    found += piece
        except ConnectionError:
            pass  # broken off
        return bytes(found)

    def hang_up(self) -> None:
        """Close at once."""
        self.writer.transport.abort()


def events_of(answer: httpx2.Response) -> list[Any]:
    """The events of a stream that was read whole; the last one is "[DONE]" or what came instead."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    return [one if one == "[DONE]" else json.loads(one) for one in found]


def error_of(answer: httpx2.Response, status: int) -> dict[str, Any]:
    """The error of an answer that has this status."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error
