"""uvicorn as the server under the application: its settings, its connections with bounds, and a way to run it on this loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...observing.logs import logger
from ..face import EngineFace
from .app import Application, make_app
from .errors import HttpError
from .sending import encode

MAX_OVERHEAD_BYTES = 1 << 18
"""What a request may send beside its body: head, trailers and the framing of chunks, beyond 8 bytes for each of its body."""
KEEP_ALIVE_S = 60
HEAD_S = 30.0
"""What a client may take from connecting, or from a request's first byte, to the end of its head."""
BACKLOG = 256
"""Connections that wait to be accepted. asyncio also accepts, or fails to, as many in one turn."""


class BoundedConnection(HttpToolsProtocol):
    """A connection that ends where its client sends heads without end, and that an application can break off.

    The parser keeps a header until it is complete, however long it is. The application's way to break off is
    `scope["extensions"]["repertory.hang_up"]["call"]`: closing would wait for a reader that does not read.
    """

    _overhead = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio does so only for sockets that were made with the protocol's number, which accepted ones inherit from
            # their listener. Without it every answer's second piece waits 40 ms for the client to acknowledge the first.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._has_head()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        """A request's head is here."""
        self._has_head()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._has_head()
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _has_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def data_received(self, data: bytes) -> None:
        """More from the client."""
        self._overhead += len(data)
        if self._overhead > MAX_OVERHEAD_BYTES:
            self.send_400_response("The request's head is too large.")
            return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._overhead = 0
        self._await_head()
        self.scope["extensions"] = {"repertory.hang_up": {"call": self.transport.abort}}

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        self._overhead -= 9 * len(body)
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the shape of every error, and close."""
        if self.transport.is_closing():
            return
        logger("http").info("http.refused", path="", status=400, reason=msg)
        body = encode(HttpError(400, msg).body())
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


def server_config(app: Application, **settings: Any) -> uvicorn.Config:
    """uvicorn's settings for `app`; `settings` are further ones of uvicorn's."""
    defaults: dict[str, Any] = {
        "http": BoundedConnection,
        "ws": "none",
        "loop": "asyncio",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "backlog": BACKLOG,
    }
    return uvicorn.Config(app, **{**defaults, **settings})


class Server(uvicorn.Server):
    """A uvicorn server that says when it listens, and leaves signals to those who own the process."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are not its own: whoever owns the process says when it is to end."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets=sockets)
        if self.started:
            self._on_started()


@asynccontextmanager
async def serve_embedded(
    engine: EngineFace,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    is_draining: Callable[[], bool] = lambda: False,
    grace_s: float = 5.0,
    send_buffer_bytes: int | None = None,
) -> AsyncIterator[str]:
    """Serve a started engine on this loop, for tests and notebooks; yields the URL. `port` 0 is any free one.

    At the end no new connections are taken, and open ones have `grace_s` seconds. `send_buffer_bytes` bounds what the
    kernel takes for a client that does not read; None is the system's choice.
    """
    listener = socket.create_server((host, port), backlog=BACKLOG)
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)  # accepted sockets inherit it
    config = server_config(make_app(engine, is_draining=is_draining), timeout_graceful_shutdown=max(1, round(grace_s)))
    started = anyio.Event()
    server = Server(config, started.set)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listener])
            await started.wait()
            try:
                yield f"http://{host}:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
    finally:
        listener.close()
