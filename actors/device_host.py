"""The device host: a process that owns the device. `python -m repertory.actors.device_host ENDPOINT`.

It connects to the ZeroMQ endpoint it is given, is told what to open (`OpenDevice`), and then runs
steps and copies on threads while its event loop sends heartbeats. It is never its own master:

| what happens | what it does |
| --- | --- |
| its parent ends, in whatever way | standard input ends; it removes the endpoint's folder and is gone |
| it is stopped (SIGSTOP) when that happens | the kernel sends SIGCONT at the parent's death, and the line above applies |
| Ctrl-C in the parent's terminal | nothing: it has a session of its own and ignores SIGINT |
| a step raises, or a lane | it reports `StepFailed` or `LaneFailed` and ends: its state is not to be trusted |
| a frame that is no message | it is logged and dropped |
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from ..gpu.executor import Executor
from ..protocol.config import EngineConfig
from ..protocol.errors import problem_of
from ..protocol.messages import CopyDone, DeviceOpened, DeviceShared, Heartbeat, OpenDevice, OpeningFailed, StepDone, StepFailed
from .device import open_executor
from .devices.codec import FromHost, LaneFailed, ToHost, decode_to_host, encode
from .devices.threads import DeviceThreads
from .heap import freeze_heap
from .links.wire import heartbeat_period_s
from .observing.logs import configure_logging, logger
from .parent import remove_folder_of, wake_when_parent_dies

OpenExecutor = Callable[[EngineConfig, Path], Executor]


class DeviceHost:
    """One device and its link. `serve` returns when a step or a lane has failed; the end of the parent ends the process."""

    def __init__(self, socket: zmq.asyncio.Socket, open_executor: OpenExecutor) -> None:
        self._socket = socket
        self._open_executor = open_executor
        self._failed = asyncio.Event()

    async def serve(self) -> None:
        """Open what the first message names, then run steps and copies until the device fails."""
        while not isinstance(opening := await self._receive(), OpenDevice):
            pass  # nothing else makes sense yet
        configure_logging(opening.config.log_format, opening.config.log_level)
        threads = DeviceThreads(
            opening.epoch,
            lambda: self._open_executor(opening.config, Path(opening.model_dir)),
            on_message=self._on_message,
        )
        beats = asyncio.create_task(self._beat(opening))
        try:
            capacity = await threads.start()
        except Exception as error:
            await self._socket.send(encode(OpeningFailed(problem_of(error))))
            return
        freeze_heap()
        await self._socket.send(encode(DeviceOpened(opening.epoch, capacity)))
        work = asyncio.create_task(self._take_work(threads))
        await self._failed.wait()
        for task in (beats, work):
            task.cancel()

    async def _take_work(self, threads: DeviceThreads) -> None:
        while True:
            message = await self._receive()
            if not isinstance(message, OpenDevice):
                threads.send(message)

    async def _receive(self) -> ToHost:
        while True:
            frame = await self._socket.recv()
            try:
                return decode_to_host(frame)
            except (msgspec.DecodeError, RecursionError) as error:
                logger("device_host").warning("link.bad_message", reason=str(error), num_bytes=len(frame))

    async def _beat(self, opening: OpenDevice) -> None:
        period_s = heartbeat_period_s(opening.config)
        while True:
            await self._socket.send(encode(Heartbeat(opening.epoch)))
            await asyncio.sleep(period_s)

    def _on_message(self, message: StepDone | StepFailed | CopyDone | LaneFailed | DeviceShared) -> None:
        self._send(message)
        if isinstance(message, StepFailed | LaneFailed):
            self._failed.set()

    def _send(self, message: FromHost) -> None:
        # Sent at once where the socket takes it, else queued in order by pyzmq.
        self._socket.send(encode(message))


def follow_parent(endpoint: str) -> None:
    """End this process, and remove the endpoint's folder, when standard input ends: the parent holds its other end."""

    def wait() -> None:
        while sys.stdin.buffer.read(1024):
            pass
        remove_folder_of(endpoint)
        os._exit(0)

    wake_when_parent_dies()
    threading.Thread(target=wait, name="repertory-parent", daemon=True).start()


async def host(endpoint: str, open_executor: OpenExecutor) -> None:
    """Serve one device over the link at `endpoint`."""
    context = zmq.asyncio.Context()
    with context.socket(zmq.PAIR) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(endpoint)
        await DeviceHost(socket, open_executor).serve()
    context.term()


def main(open_executor: OpenExecutor = open_executor) -> int:
    """Run a device host for the endpoint on the command line."""
    if len(sys.argv) != 2 or not sys.argv[1].startswith("ipc://"):
        print("usage: python -m repertory.actors.device_host ipc://PATH (started by the engine)", file=sys.stderr)  # noqa: T201
        return 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent(sys.argv[1])
    asyncio.run(host(sys.argv[1], open_executor))
    return 0


if __name__ == "__main__":
    # Whatever the compute thread is doing: nothing of this process is worth waiting for any more.
    status = main()
    sys.stderr.flush()
    os._exit(status)
