"""Holds a simulated device's copies until the test lets them through."""

from __future__ import annotations

import threading
from collections.abc import Callable

from repertory.gpu.simulated import SimulatedExecutor
from repertory.protocol.messages import CopyBlocks, CopyDirection

from .stage import PATIENCE_S


class CopyGate:
    """One direction of a device's copies. Open until `shut`; a copy that has come to it waits, and its lane with it."""

    def __init__(self, device: SimulatedExecutor, direction: CopyDirection) -> None:
        self._direction = direction
        self._is_open = threading.Event()
        self._is_open.set()
        self._inner: Callable[[CopyBlocks], None] | None = device.on_copy
        self.num_held = 0
        """Copies that wait here or have waited."""
        device.on_copy = self._wait

    def shut(self) -> None:
        """From here on copies wait."""
        self._is_open.clear()

    def open(self) -> None:
        """Let all through, from here on."""
        self._is_open.set()

    def _wait(self, copy: CopyBlocks) -> None:
        if copy.direction == self._direction and not self._is_open.is_set():
            self.num_held += 1
            if not self._is_open.wait(PATIENCE_S):
                raise TimeoutError(f"nobody let copy {copy.direction} {copy.copy_id} through")
        if self._inner is not None:
            self._inner(copy)
