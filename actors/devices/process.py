"""A device in a process of its own, joined by ZeroMQ over a socket in a private folder.

A compute thread that shares the GIL with a busy event loop can take seconds for a step of
milliseconds; a process cannot, and when it dies it takes nothing with it that the core does not
know. The price is a round trip of 0.1 to 0.2 ms.

The host counts as lost when its process has ended, when a step failed, when it has been silent for
`heartbeat_timeout_s`, or when a step or a copy is overdue (`overdue.py`). Silence is judged only when everything it has
said has been read: a late reader is not a dead sender.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from ...protocol.capacity import Capacity
from ...protocol.config import EngineConfig
from ...protocol.errors import EngineDeadError, error_from
from ...protocol.ids import Epoch
from ...protocol.messages import (
    CopyBlocks,
    CopyDone,
    DeviceOpened,
    DeviceShared,
    Heartbeat,
    OpenDevice,
    OpeningFailed,
    RunStep,
    StepDone,
    StepFailed,
)
from ..observing.logs import logger
from .codec import LaneFailed, ToHost, decode_from_host, encode, in_words
from .device import OnAnswer
from .overdue import Overdue, Patience

HOST_COMMAND = (sys.executable, "-m", "repertory.actors.device_host")
LOOK_S = 0.1
"""How often life signs are judged."""
OPENING_SILENCE_S = 60.0
"""While libraries are imported and weights read, heartbeats may be late by this much."""
LEAST_OVERDUE_S = 10.0
OVERDUE_FACTOR = 20.0
UNPREDICTED_S = 600.0
"""What the first steps and copies may take, of which nobody knows how long they should."""
GOODBYE_S = 1.0
LAST_WORDS = 4000
"""Characters that are remembered of what the host wrote last."""
WORDS_BYTES = 1 << 16


class ProcessDevice:
    """Implements `Device` with a child process. `command` is what is run, with the endpoint as its last argument."""

    def __init__(
        self,
        epoch: Epoch,
        config: EngineConfig,
        model_dir: Path,
        *,
        on_answer: OnAnswer,
        command: Sequence[str] = HOST_COMMAND,
    ) -> None:
        self.epoch = epoch
        self.config = config
        self.model_dir = model_dir
        self._command = command
        self._on_answer = on_answer
        self._log = logger("worker")
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[Capacity] = loop.create_future()
        self._lost: asyncio.Future[str] = loop.create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._process: Process | None = None
        self._folder: str | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._last_words = ""
        self._heard_at = 0.0
        self._overdue = Overdue(Patience(LEAST_OVERDUE_S, OVERDUE_FACTOR, UNPREDICTED_S))

    @property
    def pid(self) -> int | None:
        """The host's process, while there is one."""
        return None if self._process is None else self._process.pid

    @property
    def folder(self) -> str | None:
        """The private folder of its socket, while there is one."""
        return self._folder

    # ---- life -----------------------------------------------------------------------------------

    async def open(self) -> Capacity:
        """Start the process and wait until its device is open. Raises in the child's own words."""
        self._folder = tempfile.mkdtemp(prefix="repertory-")  # mode 0700, an unguessable name
        endpoint = f"ipc://{self._folder}/device"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(endpoint)
        self._process = await asyncio.create_subprocess_exec(
            *self._command, endpoint, stdin=PIPE, stdout=DEVNULL, stderr=PIPE, start_new_session=True
        )
        self._heard_at = time.monotonic()
        self._post(OpenDevice(self.epoch, self.config, str(self.model_dir)))
        for duty in (self._listen(), self._read_words(), self._await_end(), self._judge()):
            task = asyncio.create_task(duty)
            task.add_done_callback(self._duty_ended)
            self._tasks.append(task)
        waits: list[asyncio.Future[Any]] = [self._opened, self._lost]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not self._opened.done():
            raise EngineDeadError(f"the device host did not start: {self._lost.result()}{self._quoted_words()}")
        return self._opened.result()

    def send(self, message: RunStep | CopyBlocks, predicted_s: float | None) -> None:
        """Queue a step or a copy."""
        self._overdue.sent(message, predicted_s, time.monotonic())
        self._post(message)

    async def lost(self) -> str:
        """Wait until the host is gone."""
        return await asyncio.shield(self._lost)

    async def aclose(self) -> None:
        """End the process: politely, by closing its input, then by force."""
        if self._process is not None:
            await self._end(self._process)  # done again by the next call if this one is cancelled
            self._process = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def _end(self, process: Process) -> None:
        if not self._lost.done():
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), GOODBYE_S)
        if process.returncode is None:
            # A stopped process does not read its input; the group is the host and what it may have started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    # ---- duties ---------------------------------------------------------------------------------

    async def _listen(self) -> None:
        assert self._socket is not None
        while True:
            frame = await self._socket.recv()
            self._heard_at = time.monotonic()
            try:
                message = decode_from_host(frame)
            except msgspec.DecodeError as error:
                self._log.warning("link.bad_message", reason=str(error), num_bytes=len(frame))
                continue
            match message:
                case DeviceShared():
                    self._on_answer(message)
                case StepDone() | CopyDone():
                    self._overdue.answered(message, time.monotonic())
                    self._on_answer(message)
                case StepFailed() | LaneFailed():
                    self._lose(in_words(message))
                case DeviceOpened():
                    self._opened.set_result(message.capacity)
                case OpeningFailed():
                    self._opened.set_exception(error_from(message.problem))
                case Heartbeat():
                    pass

    async def _read_words(self) -> None:
        """Pass the host's log lines and tracebacks on, and remember the last ones."""
        assert self._process is not None
        assert self._process.stderr is not None
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        while read := await self._process.stderr.read(WORDS_BYTES):  # not by lines: they may be longer than any limit
            text = decode(read)
            self._last_words = (self._last_words + text)[-LAST_WORDS:]
            sys.stderr.write(text)

    async def _await_end(self) -> None:
        process = self._process
        assert process is not None
        status = await process.wait()
        # What it wrote before it ended is still in the pipe and the socket.
        await asyncio.sleep(LOOK_S)
        self._lose(f"the device host ended with {status_in_words(status)}")

    async def _judge(self) -> None:
        assert self._socket is not None
        while True:
            await asyncio.sleep(LOOK_S)
            # Not `poll`: it takes the socket's event from whoever waits in `recv`, who then sleeps beside a full socket.
            events = self._socket.get(zmq.EVENTS)
            assert isinstance(events, int)
            if events & zmq.POLLIN:
                continue  # it has spoken, and has not been heard yet
            now = time.monotonic()
            patience_s = self.config.heartbeat_timeout_s
            if not self._opened.done():
                patience_s = max(patience_s, OPENING_SILENCE_S)
            if now - self._heard_at > patience_s:
                self._lose(f"the device host has been silent for {now - self._heard_at:.1f} s")
            elif (reason := self._overdue.verdict(now)) is not None:
                self._lose(reason)

    def _duty_ended(self, task: asyncio.Task[None]) -> None:
        """A link that nobody listens to, or a host that nobody judges, is as good as lost."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._lose(f"the link to the device host failed: {error!r}")

    def _lose(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)

    def _post(self, message: ToHost) -> None:
        if self._socket is not None:
            # Sent at once, not by a task in the loop's next turn: that may be seconds away, and the message counts as sent.
            sent = asyncio.ensure_future(self._socket.send(encode(message)))
            sent.add_done_callback(_forget_failure)

    def _quoted_words(self) -> str:
        return "\n" + self._last_words.rstrip() if self._last_words else ""


def status_in_words(status: int) -> str:
    """How a process ended: its status, or the signal by name."""
    if status >= 0:
        return f"status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"signal {names.get(-status, -status)}"


def _forget_failure(sent: asyncio.Future[Any]) -> None:
    """A frame to a host that is gone: its loss is noticed elsewhere."""
    if not sent.cancelled():
        sent.exception()
