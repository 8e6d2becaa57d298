"""The server: a parent that serves nothing itself, but keeps a core host and frontend hosts running.

It opens the listening socket that the frontends share, so that a port that is taken is said at once and none is lost
with a frontend, and the private folder of the link. Signals:

| signal | what follows |
| --- | --- |
| SIGTERM, SIGINT | what is new is refused, what runs is finished within `drain_s`, then all end |
| a second one | all end at once |
| any that cannot be caught | all children see the end of their input, and end; the last removes the folder |
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import anyio

from ...protocol.config import EngineConfig
from ...protocol.errors import ConfigError
from ...protocol.link import without_secrets
from ..observing.logs import logger
from .child import Child
from .lines import CoreOrders, Drain, FrontendOrders
from .post import Post

CORE_COMMAND = (sys.executable, "-m", "repertory.actors.core_host")
FRONTEND_COMMAND = (sys.executable, "-m", "repertory.actors.frontend_host")
GRACE_S = 5.0
"""What frontends may take to close their connections after the deadline of draining."""
BACKLOG = 2048
SIGNALLED = 128


class Server:
    """One core host and `config.frontends` frontend hosts. `serve` runs it to its end."""

    def __init__(
        self,
        config: EngineConfig,
        listener: socket.socket,
        endpoint: str,
        *,
        core_command: Sequence[str] = CORE_COMMAND,
        frontend_command: Sequence[str] = FRONTEND_COMMAND,
    ) -> None:
        self.endpoint = endpoint
        self.url = url_of(listener)
        self._log = logger("serve")
        self._num_signals = 0
        self._stopping = asyncio.Event()
        patience_s = config.heartbeat_timeout_s
        descriptor = listener.fileno()

        def core() -> Child:
            return Child(core_command, CoreOrders(endpoint, without_secrets(config)), patience_s=patience_s)

        def frontend() -> Child:
            orders = FrontendOrders(endpoint, config, descriptor)
            return Child(frontend_command, orders, patience_s=patience_s, pass_fds=[descriptor])

        self.core = Post("core host", core, config)
        self.frontends = [Post(f"frontend host {number}", frontend, config) for number in range(1, config.frontends + 1)]
        self.posts = [self.core, *self.frontends]

    async def serve(self, *, drain_s: float, announce: Callable[[Server], None]) -> int:
        """Serve until a signal; returns the exit status. `announce` is called when all processes serve.

        Raises what kept a process from starting, and `EngineDeadError` when one ends too often.
        """
        started = time.monotonic()
        with self._signals():
            async with anyio.create_task_group() as group:
                self._kill = group.cancel_scope.cancel
                for post in self.posts:
                    group.start_soon(post.run)
                group.start_soon(self._announce, announce, started)
                await self._stopping.wait()
                if all(post.has_served.is_set() for post in self.posts):
                    await self._drain(drain_s)
                group.cancel_scope.cancel()
        self._log.info("serve.stop", seconds=round(time.monotonic() - started, 3))
        return 0 if self._num_signals < 2 else SIGNALLED + signal.SIGINT

    async def _announce(self, announce: Callable[[Server], None], started: float) -> None:
        for post in self.posts:
            await post.has_served.wait()
        self._log.info(
            "serve.ready",
            url=self.url,
            endpoint=self.endpoint,
            frontends=len(self.frontends),
            seconds=round(time.monotonic() - started, 3),
        )
        announce(self)

    async def _drain(self, drain_s: float) -> None:
        self._log.info("serve.drain", deadline_s=drain_s)
        for post in self.posts:
            post.is_leaving = True
        with anyio.move_on_after(drain_s + GRACE_S):
            async with anyio.create_task_group() as group:
                for post in self.frontends:
                    if post.child is not None:
                        post.child.tell(Drain(drain_s))
                        group.start_soon(post.child.gone.wait)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._stopping.set()
        if self._num_signals > 1:
            for post in self.posts:
                if post.child is not None:
                    post.child.kill()
            self._kill()


@contextmanager
def private_endpoint() -> Iterator[str]:
    """An `ipc://` endpoint in a folder that only we may enter, with a name that nobody can guess, removed at the end."""
    folder = tempfile.mkdtemp(prefix="repertory-")  # mode 0700
    try:
        yield f"ipc://{folder}/core"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def listen_on(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises `ConfigError` that names `host` or `port`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"host: {host!r} is no address of this machine: {error.strerror}", key="host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"port: cannot listen on {host} port {port}: {error.strerror}", key="port") from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients reach it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
