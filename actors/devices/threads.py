"""An executor and the three threads that drive it: the worker's compute thread and the swap manager's lanes.

They share the executor, and end in this order: nothing new is begun, whoever waits for a fence is woken, the lanes
end, and only then the compute thread closes the executor, whose memory the lanes would otherwise lose under their hands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio

from ...gpu.executor import Executor, Watch
from ...protocol.capacity import Capacity
from ...protocol.ids import Epoch
from ...protocol.messages import CopyBlocks, CopyDone, DeviceShared, RunStep, StepDone, StepFailed
from .codec import LaneFailed
from .compute import ComputeThread
from .swap_manager import SwapManager

OnMessage = Callable[[StepDone | StepFailed | CopyDone | LaneFailed | DeviceShared], None]

WATCH_S = 5.0
"""How often it is asked who else uses the device."""


class DeviceThreads:
    """Opens an executor and runs what it is sent. Made on the event loop it reports to.

    `on_message` gets every answer on that loop. After a `StepFailed` or a `LaneFailed` there is only `aclose`.
    """

    def __init__(self, epoch: Epoch, open_executor: Callable[[], Executor], on_message: OnMessage) -> None:
        self._epoch = epoch
        self._on_message = on_message
        self._compute = ComputeThread(open_executor, on_message)
        self._executor: Executor | None = None
        self._swap_manager: SwapManager | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> Capacity:
        """Open the device; raises what opening raised."""
        self._executor = await self._compute.start()
        self._swap_manager = SwapManager(self._executor, self._on_message)
        if self._executor.watch is not None:
            self._watching = asyncio.create_task(self._watch(self._executor.watch))
        return self._executor.capacity

    def send(self, message: RunStep | CopyBlocks) -> None:
        """Queue a step or a copy. Whatever it waits for has been queued before it."""
        if isinstance(message, RunStep):
            self._compute.send(message)
        elif self._swap_manager is not None:
            self._swap_manager.send(message)

    async def aclose(self) -> None:
        """Wait for what runs now, drop what does not yet, close the device. Idempotent."""
        self._compute.drop()
        if self._watching is not None:
            self._watching.cancel()
        if self._executor is not None:
            self._executor.interrupt()
        if self._swap_manager is not None:
            await self._swap_manager.aclose()
        await self._compute.aclose()
        self._executor = self._swap_manager = self._watching = None

    async def _watch(self, watch: Watch) -> None:
        while True:
            if (reason := await anyio.to_thread.run_sync(watch)) is not None:
                self._on_message(DeviceShared(self._epoch, reason))
            await anyio.sleep(WATCH_S)
