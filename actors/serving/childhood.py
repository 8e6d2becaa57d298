"""A child's view of its parent: orders come in, life signs go out, and the end of one is the end of the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import BinaryIO

import msgspec

from ...protocol.config import EngineConfig
from ...protocol.errors import problem_of
from ..links.wire import heartbeat_period_s
from ..observing.logs import configure_logging, logger
from ..parent import remove_folder_of, wake_when_parent_dies
from .lines import Alive, CoreOrders, Drain, Failed, FrontendOrders, ToChild, ToParent, as_line, decode_to_child

FAILED = 1
LEAVE_S = 2.0
"""What a child may take to put its things in order once its parent has gone."""


class Parent:
    """The other end of standard input and output. Made once, before anything else of the process."""

    def __init__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            # The parent's to hear, also where they are sent to all processes (a service manager does that).
            signal.signal(number, signal.SIG_IGN)
        wake_when_parent_dies()
        # Whoever prints, prints to the log: our lines have the pipe to themselves.
        self._out = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._in: BinaryIO = sys.stdin.buffer
        self.is_draining = asyncio.Event()
        self.drain_s = 0.0

    def orders(self) -> CoreOrders | FrontendOrders:
        """Wait for the first line. Ends the process where there is none."""
        line = self._in.readline()
        try:
            orders = decode_to_child(line)
        except msgspec.DecodeError as error:
            raise SystemExit(f"{sys.argv[0]} is started by repertory serve, and gets its orders as a line: {error}") from None
        assert not isinstance(orders, Drain)
        return orders

    def follow(self, endpoint: str, leave: Callable[[], object]) -> None:
        """End with the parent, and remove the folder of the endpoint then. Called on the loop that is to hear of `Drain`.

        `leave` is called there when the parent has gone; what has not ended `LEAVE_S` later ends anyway.
        """
        loop = asyncio.get_running_loop()

        def wait() -> None:
            for line in self._in:
                self._hear(line, loop)
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(leave)
            time.sleep(LEAVE_S)
            remove_folder_of(endpoint)
            os._exit(0)

        threading.Thread(target=wait, name="repertory-parent", daemon=True).start()

    def say(self, message: ToParent) -> None:
        """Write a line. A parent that has gone is noticed by `follow`."""
        try:
            os.write(self._out, as_line(message))
        except BrokenPipeError:
            return

    async def stay_alive(self, config: EngineConfig) -> None:
        """Say so again and again, until cancelled."""
        while True:
            self.say(Alive())
            await asyncio.sleep(heartbeat_period_s(config))

    def _hear(self, line: bytes, loop: asyncio.AbstractEventLoop) -> None:
        try:
            message: ToChild = decode_to_child(line)
        except msgspec.DecodeError as error:
            logger("serve").warning("link.bad_message", reason=str(error), num_bytes=len(line))
            return
        if isinstance(message, Drain):
            loop.call_soon_threadsafe(self._drain, message.timeout_s)

    def _drain(self, timeout_s: float) -> None:
        self.drain_s = timeout_s
        self.is_draining.set()


def run_child(serve: Callable[[CoreOrders | FrontendOrders, Parent], Awaitable[None]]) -> int:
    """Live a child's life: take orders, serve, and say why when that fails. Returns the exit status."""
    parent = Parent()
    orders = parent.orders()
    configure_logging(orders.config.log_format, orders.config.log_level)

    async def live() -> None:
        serving = asyncio.ensure_future(serve(orders, parent))
        parent.follow(orders.endpoint, serving.cancel)
        beats = asyncio.create_task(parent.stay_alive(orders.config))
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        finally:
            beats.cancel()
            if serving.cancelled():
                remove_folder_of(orders.endpoint)

    try:
        asyncio.run(live())
    except Exception as error:
        parent.say(Failed(problem_of(error)))
        return FAILED
    return 0
