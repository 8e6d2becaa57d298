"""One life of a child process, as its parent sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

import anyio
import msgspec

from ...protocol.errors import Problem
from ..devices.process import status_in_words
from ..links.wire import LOOK_S
from ..observing.logs import logger
from .lines import Failed, Ready, ToChild, as_line, decode_to_parent

OPENING_SILENCE_S = 60.0
"""While libraries are imported, life signs may be late by this much."""
GOODBYE_S = 3.0
LINE_BYTES = 1 << 20
LATE = 3
"""So many times later than it should, a look is not trusted."""


class Child:
    """A process that gets `orders` as its first line. `ended` waits for its end, which it brings about when it is silent."""

    def __init__(self, command: Sequence[str], orders: ToChild, *, patience_s: float, pass_fds: Sequence[int] = ()) -> None:
        self.problem: Problem | None = None
        """Why it ends, in its own words."""
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        """Done when it serves."""
        self.gone = asyncio.Event()
        """Set when its end has been seen."""
        self._command = command
        self._orders = orders
        self._patience_s = patience_s
        self._pass_fds = pass_fds
        self._process: Process | None = None
        self._untold: list[ToChild] = []
        self._heard_at = 0.0
        self._silence: str | None = None
        self._log = logger("serve")

    @property
    def pid(self) -> int | None:
        """Its process, once there is one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES, start_new_session=True, pass_fds=self._pass_fds
        )
        self._heard_at = time.monotonic()
        untold, self._untold = self._untold, []
        for message in (self._orders, *untold):
            self.tell(message)

    def tell(self, message: ToChild) -> None:
        """Send it a line, as soon as there is a process. One that has gone does not read it."""
        if self._process is None:
            self._untold.append(message)
            return
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(as_line(message))

    async def ended(self) -> str:
        """Wait for its end; how it came about, in words. Cancelled, it ends the process: politely, then by force."""
        process = self._process
        assert process is not None
        judging = asyncio.create_task(self._judge(process))
        try:
            await self._listen(process)
            status = await process.wait()
        finally:
            judging.cancel()
            with anyio.CancelScope(shield=True):
                await self.end()
            self.gone.set()
        if self._silence is not None:
            return self._silence
        return self.problem.message if self.problem is not None else f"it ended with {status_in_words(status)}"

    async def end(self, goodbye_s: float = GOODBYE_S) -> None:
        """End the process: by the end of its input, then by force. Idempotent."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), goodbye_s)
        self.kill()
        await process.wait()

    def kill(self) -> None:
        """End the process and what it has started at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _listen(self, process: Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError as error:
                self._log.warning("link.bad_message", reason=str(error), num_bytes=LINE_BYTES)
                continue
            if not line:
                return
            self._heard_at = time.monotonic()
            try:
                message = decode_to_parent(line)
            except msgspec.DecodeError as error:
                self._log.warning("link.bad_message", reason=str(error), num_bytes=len(line))
                continue
            if isinstance(message, Failed):
                self.problem = message.problem
            elif isinstance(message, Ready) and not self.ready.done():
                self.ready.set_result(None)

    async def _judge(self, process: Process) -> None:
        """End a process that is there and does not turn any more (stopped, or hanging)."""
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            is_late, looked_at = now - looked_at > LATE * LOOK_S, now
            if is_late:
                continue  # it is we who did not turn: what it has said meanwhile may not be read yet
            patience_s = self._patience_s if self.ready.done() else max(self._patience_s, OPENING_SILENCE_S)
            if now - self._heard_at > patience_s:
                self._silence = f"it was silent for {now - self._heard_at:.1f} s"
                self.kill()
                return
