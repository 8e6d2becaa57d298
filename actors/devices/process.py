"""A device in a process of its own, joined by ZeroMQ over a socket in a private folder.

A compute thread that shares the GIL with a busy event loop can take seconds for a step of
milliseconds; a process cannot, and when it dies it takes nothing with it that the core does not
know. The price is a round trip of 0.1 to 0.2 ms.

The host counts as lost when its process has ended, when a step failed, when it has been silent for
`heartbeat_timeout_s`, or when a step is overdue. Silence is judged only when everything it has
said has been read: a late reader is not a dead sender.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
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
from ...protocol.messages import DeviceOpened, Heartbeat, OpenDevice, OpeningFailed, RunStep, StepDone, StepFailed
from ..observing.logs import logger
from .codec import decode_from_host, encode
from .device import OnStepDone

HOST_COMMAND = (sys.executable, "-m", "repertory.actors.device_host")
LOOK_S = 0.1
"""How often life signs are judged."""
OPENING_SILENCE_S = 60.0
"""While libraries are imported and weights read, heartbeats may be late by this much."""
LEAST_OVERDUE_S = 10.0
OVERDUE_FACTOR = 20.0
GOODBYE_S = 1.0
LAST_WORDS = 30


class ProcessDevice:
    """Implements `Device` with a child process. `command` is what is run, with the endpoint as its last argument."""

    def __init__(
        self,
        epoch: Epoch,
        config: EngineConfig,
        model_dir: Path,
        *,
        on_step_done: OnStepDone,
        command: Sequence[str] = HOST_COMMAND,
    ) -> None:
        self.epoch = epoch
        self.config = config
        self.model_dir = model_dir
        self._command = command
        self._on_step_done = on_step_done
        self._log = logger("worker")
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[Capacity] = loop.create_future()
        self._lost: asyncio.Future[str] = loop.create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._process: Process | None = None
        self._folder: str | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._last_words: deque[str] = deque(maxlen=LAST_WORDS)
        self._heard_at = 0.0
        self._outstanding: deque[float | None] = deque()  # predictions of the steps sent and not answered
        self._working_since = 0.0

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
            self._tasks.append(asyncio.create_task(duty))
        waits: list[asyncio.Future[Any]] = [self._opened, self._lost]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not self._opened.done():
            raise EngineDeadError(f"the device host did not start: {self._lost.result()}{self._quoted_words()}")
        return self._opened.result()

    def send(self, step: RunStep, predicted_s: float | None) -> None:
        """Queue a step."""
        if not self._outstanding:
            self._working_since = time.monotonic()
        self._outstanding.append(predicted_s)
        self._post(step)

    async def post_frame(self, frame: bytes) -> None:
        """Send bytes as they are."""
        if self._socket is not None:
            await self._socket.send(frame)

    async def lost(self) -> str:
        """Wait until the host is gone."""
        return await asyncio.shield(self._lost)

    async def aclose(self) -> None:
        """End the process: politely, by closing its input, then by force."""
        process, self._process = self._process, None
        if process is not None:
            await self._end(process)
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
                case StepDone():
                    self._answered()
                    self._on_step_done(message)
                case StepFailed():
                    self._lose(f"step {message.step_id} failed: {message.problem.message}")
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
        while line := await self._process.stderr.readline():
            text = line.decode(errors="replace")
            self._last_words.append(text)
            sys.stderr.write(text)

    async def _await_end(self) -> None:
        process = self._process
        assert process is not None
        status = await process.wait()
        # What it wrote before it ended is still in the pipe and the socket.
        await asyncio.sleep(LOOK_S)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        self._lose(f"the device host ended with {how}")

    async def _judge(self) -> None:
        assert self._socket is not None
        while True:
            await asyncio.sleep(LOOK_S)
            if await self._socket.poll(0):
                continue  # it has spoken, and has not been heard yet
            now = time.monotonic()
            patience_s = self.config.heartbeat_timeout_s
            if not self._opened.done():
                patience_s = max(patience_s, OPENING_SILENCE_S)
            if now - self._heard_at > patience_s:
                self._lose(f"the device host has been silent for {now - self._heard_at:.1f} s")
            elif self._outstanding and (predicted_s := self._outstanding[0]) is not None:
                late_s = now - self._working_since - predicted_s
                if late_s > max(LEAST_OVERDUE_S, OVERDUE_FACTOR * predicted_s):
                    self._lose(f"a step is overdue by {late_s:.1f} s (it should have taken {predicted_s:.3f} s)")

    def _answered(self) -> None:
        if self._outstanding:
            self._outstanding.popleft()
        self._working_since = time.monotonic()

    def _lose(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)

    def _post(self, message: OpenDevice | RunStep) -> None:
        if self._socket is not None:
            sent = asyncio.ensure_future(self.post_frame(encode(message)))
            sent.add_done_callback(_forget_failure)

    def _quoted_words(self) -> str:
        return "\n" + "".join(self._last_words).rstrip() if self._last_words else ""


def _forget_failure(sent: asyncio.Future[Any]) -> None:
    """A frame to a host that is gone: its loss is noticed elsewhere."""
    if not sent.cancelled():
        sent.exception()
