"""An executor and the three threads that drive it: the worker's compute thread and the swap manager's lanes.

They share the executor, and end in this order: nothing new is begun, whoever waits for a fence is woken, the lanes
end, and only then the compute thread closes the executor, whose memory the lanes would otherwise lose under their hands.
"""

from __future__ import annotations

from collections.abc import Callable

from ...gpu.executor import Executor
from ...protocol.capacity import Capacity
from ...protocol.messages import CopyBlocks, CopyDone, RunStep, StepDone, StepFailed
from .codec import LaneFailed
from .compute import ComputeThread
from .swap_manager import SwapManager

OnMessage = Callable[[StepDone | StepFailed | CopyDone | LaneFailed], None]


class DeviceThreads:
    """Opens an executor and runs what it is sent. Made on the event loop it reports to.

    `on_message` gets every answer on that loop. After a `StepFailed` or a `LaneFailed` there is only `aclose`.
    """

    def __init__(self, open_executor: Callable[[], Executor], on_message: OnMessage) -> None:
        self._on_message = on_message
        self._compute = ComputeThread(open_executor, on_message)
        self._executor: Executor | None = None
        self._swap_manager: SwapManager | None = None

    async def start(self) -> Capacity:
        """Open the device; raises what opening raised."""
        self._executor = await self._compute.start()
        self._swap_manager = SwapManager(self._executor, self._on_message)
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
        if self._executor is not None:
            self._executor.interrupt()
        if self._swap_manager is not None:
            await self._swap_manager.aclose()
        await self._compute.aclose()
        self._executor = self._swap_manager = None
