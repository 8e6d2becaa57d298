"""One life of a device: opened once, given steps and copies, lost or closed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...protocol.capacity import Capacity
from ...protocol.ids import Epoch
from ...protocol.messages import CopyBlocks, CopyDone, DeviceShared, RunStep, StepDone

OnAnswer = Callable[[StepDone | CopyDone | DeviceShared], None]
"""Called on the event loop for each step and each copy that has ended, in order within each timeline only."""


class Device(Protocol):
    """What the keeper needs of a device, wherever it runs."""

    async def open(self) -> Capacity:
        """Load the model. Raises what kept the device from opening, in its own words."""
        ...

    def send(self, message: RunStep | CopyBlocks, predicted_s: float | None) -> None:
        """Queue a step or a copy; `predicted_s` is how long it should take. Never waits. A lost device swallows it.

        Whatever it waits for has been sent before it.
        """
        ...

    async def lost(self) -> str:
        """Wait until the device is gone by itself; return the reason. Cancelled when it is closed."""
        ...

    async def aclose(self) -> None:
        """End it, by force if need be, and give everything back. Idempotent."""
        ...


MakeDevice = Callable[[Epoch, OnAnswer], Device]
