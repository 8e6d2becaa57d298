"""A device on threads of this process: for tests, notebooks, and machines where a process is too much."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...gpu.executor import Executor
from ...protocol.capacity import Capacity
from ...protocol.ids import Epoch
from ...protocol.messages import CopyBlocks, CopyDone, DeviceShared, RunStep, StepDone, StepFailed
from .codec import LaneFailed, in_words
from .device import OnAnswer
from .threads import DeviceThreads


class InlineDevice:
    """Implements `Device`. It is lost when a step or a lane raises, and cannot die otherwise without the whole process."""

    def __init__(self, epoch: Epoch, open_executor: Callable[[], Executor], on_answer: OnAnswer) -> None:
        self._on_answer = on_answer
        self._threads = DeviceThreads(epoch, open_executor, self._on_message)
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def open(self) -> Capacity:
        """Load the model on the compute thread."""
        return await self._threads.start()

    def send(self, message: RunStep | CopyBlocks, predicted_s: float | None) -> None:
        """Queue a step or a copy."""
        self._threads.send(message)

    async def lost(self) -> str:
        """Wait for a step or a lane to raise."""
        return await asyncio.shield(self._lost)

    async def aclose(self) -> None:
        """Wait for the step and the copies that run, then close the device."""
        await self._threads.aclose()

    def _on_message(self, message: StepDone | StepFailed | CopyDone | LaneFailed | DeviceShared) -> None:
        if isinstance(message, StepDone | CopyDone | DeviceShared):
            self._on_answer(message)
        elif not self._lost.done():
            self._lost.set_result(in_words(message))
