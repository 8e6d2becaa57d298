"""A frontend host: a process that speaks HTTP, with a Tokenizer and a Detokenizer. `python -m repertory.actors.frontend_host`.

`repertory serve` starts as many as it is asked for, and tells each where the core is and which listening socket they
share (`serving/lines.py`). It is never its own master:

| what happens | what it does |
| --- | --- |
| its parent ends, in whatever way | standard input ends, and it is gone |
| the core ends | its streams end with an error, it answers errors, and connects to the next core |
| it is told to drain | what is new is refused (503), what runs is finished, and it ends; at the deadline it ends anyway |
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, Protocol

from ..protocol.errors import EngineDeadError
from .frontends.face import EngineFace
from .frontends.http.app import make_app
from .frontends.http.server import Server, server_config
from .frontends.remote import RemoteEngine
from .heap import freeze_heap
from .observing.exporting import traces_exported
from .serving.childhood import Parent, run_child
from .serving.lines import CoreOrders, FrontendOrders, Ready

GOODBYE_S = 2.0
"""What connections may take to close once nothing runs any more."""


class MakeApp(Protocol):
    """Makes the ASGI application that serves an engine; while `is_draining` says so it refuses what is new."""

    def __call__(self, engine: EngineFace, *, is_draining: Callable[[], bool]) -> Any:
        """The application."""
        ...


async def serve_http(orders: FrontendOrders, parent: Parent, make_app: MakeApp) -> None:
    """Serve HTTP until told to drain. Raises what ended it."""
    with traces_exported():
        async with RemoteEngine(orders.endpoint, timeout_s=None, config=orders.config) as engine:
            await _serve_engine(engine, orders, parent, make_app)


async def _serve_engine(engine: RemoteEngine, orders: FrontendOrders, parent: Parent, make_app: MakeApp) -> None:
    app = make_app(engine, is_draining=parent.is_draining.is_set)
    config = server_config(app, timeout_graceful_shutdown=int(GOODBYE_S))
    server = Server(config, lambda: parent.say(Ready()))
    freeze_heap()
    duties = [asyncio.create_task(_drain(server, engine, parent)), asyncio.create_task(_stop_with(engine, server))]
    try:
        await server.serve(sockets=[socket.socket(fileno=orders.socket)])
    finally:
        for duty in duties:
            duty.cancel()
    if not parent.is_draining.is_set():
        await engine.check_health()  # raises what it died of: another frontend takes over


async def _stop_with(engine: RemoteEngine, server: Server) -> None:
    """A frontend whose engine has ended answers nothing but errors: it ends too, and is started again."""
    await engine.ended()
    server.should_exit = True


async def _drain(server: Server, engine: RemoteEngine, parent: Parent) -> None:
    await parent.is_draining.wait()
    try:
        is_done = await engine.drain(parent.drain_s)
    except EngineDeadError:
        is_done = True  # whatever ran has ended with the core
    if not is_done:
        await engine.aclose()  # streams that are still open end with an error
    server.should_exit = True


def main(make_app: MakeApp = make_app) -> int:
    """Run a frontend host; returns its exit status."""

    async def serve(orders: CoreOrders | FrontendOrders, parent: Parent) -> None:
        assert isinstance(orders, FrontendOrders)
        await serve_http(orders, parent, make_app)

    return run_child(serve)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
