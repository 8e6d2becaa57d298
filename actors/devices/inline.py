"""A device on a thread of this process: for tests, notebooks, and machines where a process is too much."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...gpu.executor import Executor
from ...protocol.capacity import Capacity
from ...protocol.messages import RunStep, StepDone, StepFailed
from .compute import ComputeThread
from .device import OnStepDone


class InlineDevice:
    """Implements `Device`. It is lost when a step raises, and cannot die otherwise without the whole process."""

    def __init__(self, open_executor: Callable[[], Executor], on_step_done: OnStepDone) -> None:
        self._on_step_done = on_step_done
        self._compute = ComputeThread(open_executor, self._on_message)
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def open(self) -> Capacity:
        """Load the model on the compute thread."""
        return await self._compute.start()

    def send(self, step: RunStep, predicted_s: float | None) -> None:
        """Queue a step."""
        self._compute.send(step)

    async def lost(self) -> str:
        """Wait for a step to raise."""
        return await asyncio.shield(self._lost)

    async def aclose(self) -> None:
        """Wait for the step that runs, then close the device."""
        await self._compute.aclose()

    def _on_message(self, message: StepDone | StepFailed) -> None:
        if isinstance(message, StepDone):
            self._on_step_done(message)
        elif not self._lost.done():
            self._lost.set_result(f"step {message.step_id} failed: {message.problem.message}")
