"""The keeper: opens the device, hands it steps and copies, and opens another when it is lost.

The scheduler knows lives by their epoch. A step or copy of an epoch that is over goes nowhere, an answer
of one is dropped: nothing a dead device was told or said can reach a living one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import anyio

from ...protocol.capacity import Capacity
from ...protocol.config import EngineConfig
from ...protocol.errors import EngineDeadError
from ...protocol.ids import Epoch
from ...protocol.messages import CopyBlocks, CopyDone, DeviceLost, DeviceReady, DeviceShared, RunStep, StepDone
from ..observing.logs import logger
from .budget import RestartBudget
from .device import Device, MakeDevice

RETRY_S = 0.001

ToScheduler = StepDone | CopyDone | DeviceShared | DeviceLost | DeviceReady
Post = Callable[[ToScheduler], bool]
"""Puts a message into the scheduler's inbox; False when that is full."""


class DeviceKeeper:
    """Supervises one device after another. Sends `StepDone`, `CopyDone`, `DeviceLost`, `DeviceReady` to the scheduler.

    Raises `EngineDeadError` out of `run` when the restart budget is spent.
    """

    def __init__(self, make_device: MakeDevice, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._make_device = make_device
        self._budget = RestartBudget(config.max_restarts, config.restart_window_s)
        self._clock = clock
        self._log = logger("worker")
        self._post: Post | None = None
        self._undelivered: deque[ToScheduler] = deque()
        self._device: Device | None = None
        self.epoch = Epoch(0)
        self.num_sequences = 0
        """Sequences the device remembered after its last step."""

    async def open(self) -> Capacity:
        """Open the first device. Raises what kept it from opening."""
        return await self._begin()

    def report_to(self, post: Post) -> None:
        """Where the device's answers and fate go."""
        self._post = post

    def send(self, message: RunStep | CopyBlocks, predicted_s: float | None = None) -> None:
        """Hand a step or a copy to the device of its epoch. Whatever it waits for has been handed over before it."""
        if self._device is not None and message.epoch == self.epoch:
            self._device.send(message, predicted_s)

    def on_progress(self) -> None:
        """The engine gets on: deaths so far do not count against the budget any more."""
        self._budget.on_progress()

    async def run(self) -> None:
        """Watch over the device until cancelled."""
        while True:
            assert self._device is not None
            reason = await self._device.lost()
            while True:
                await self._bury(reason)
                try:
                    await self._begin()
                except Exception as error:
                    reason = f"it did not open again: {error}"
                else:
                    break
            self._deliver(DeviceReady(self.epoch))
            self._log.info("device.ready", epoch=self.epoch)

    async def aclose(self) -> None:
        """Close the device."""
        if self._device is not None:
            await self._device.aclose()
            self._device = None

    async def _begin(self) -> Capacity:
        self.epoch = Epoch(self.epoch + 1)
        self.num_sequences = 0
        self._device = self._make_device(self.epoch, self._on_answer)
        return await self._device.open()

    async def _bury(self, reason: str) -> None:
        """The device is gone: make sure of it, tell the scheduler, wait. Raises when it has died too often."""
        await self.aclose()
        wait_s = self._budget.on_death(self._clock())
        self._log.error("device.lost", epoch=self.epoch, reason=reason, restart_in_s=wait_s)
        if wait_s is None:
            raise EngineDeadError(f"the device died too often without progress; the last time: {reason}")
        self._deliver(DeviceLost(self.epoch, reason))
        await anyio.sleep(wait_s)

    def _on_answer(self, message: StepDone | CopyDone | DeviceShared) -> None:
        if message.epoch != self.epoch or self._device is None:
            return
        if isinstance(message, StepDone):
            self.num_sequences = message.num_sequences
            if message.token_ids:
                self.on_progress()
        elif isinstance(message, DeviceShared):
            self._log.info("device.shared", epoch=message.epoch, reason=message.reason)
        elif not message.ok:
            self._log.warning(
                "copy.failed",
                epoch=message.epoch,
                copy_id=message.copy_id,
                direction=message.direction,
                reason=message.reason,
            )
        self._deliver(message)

    def _deliver(self, message: ToScheduler) -> None:
        self._undelivered.append(message)
        self._flush()

    def _flush(self) -> None:
        """A full inbox is emptied in the scheduler's next turn: nothing is lost, and the order is kept."""
        while self._undelivered and self._post is not None:
            if not self._post(self._undelivered[0]):
                asyncio.get_running_loop().call_later(RETRY_S, self._flush)
                return
            self._undelivered.popleft()
