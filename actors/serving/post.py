"""A place in a server that one child after another fills."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import anyio

from ...protocol.config import EngineConfig
from ...protocol.errors import EngineDeadError, error_from
from ..devices.budget import RestartBudget
from ..observing.logs import logger
from .child import Child


class Post:
    """Keeps a child running: starts it, and again when it has ended, unless that has happened too often.

    One that does not even start the first time is not tried again: its mistake is the caller's to hear of.
    """

    def __init__(self, name: str, make_child: Callable[[], Child], config: EngineConfig) -> None:
        self.name = name
        self.child: Child | None = None
        self.has_served = asyncio.Event()
        """Set when the first child serves."""
        self.is_leaving = False
        """Whether the next end is the last."""
        self._make_child = make_child
        self._budget = RestartBudget(config.max_restarts, config.restart_window_s)
        self._log = logger("serve")

    async def run(self) -> None:
        """Keep the post filled until cancelled, or until a child ends that was to leave. Raises when it cannot."""
        while not self.is_leaving:
            child = self.child = self._make_child()
            await child.start()
            child.ready.add_done_callback(self._on_ready)
            reason = await child.ended()
            child.ready.cancel()
            if self.is_leaving:
                return
            if not self.has_served.is_set():
                raise (
                    error_from(child.problem) if child.problem else EngineDeadError(f"the {self.name} did not start: {reason}")
                )
            wait_s = self._budget.on_death(time.monotonic())
            self._log.error("process.ended", process=self.name, reason=reason, restart_in_s=wait_s)
            if wait_s is None:
                raise EngineDeadError(f"the {self.name} ended too often; the last time: {reason}")
            await anyio.sleep(wait_s)

    def _on_ready(self, ready: asyncio.Future[None]) -> None:
        if not ready.cancelled():
            assert self.child is not None
            self._log.info("process.ready", process=self.name, pid=self.child.pid)
            self.has_served.set()
