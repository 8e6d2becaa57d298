"""The two lanes of copies between the tiers, each a thread as in a device host: idle, or busy all the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from repertory.gpu.cuda.executor import GpuExecutor
from repertory.protocol.ids import BlockId, CopyId
from repertory.protocol.messages import CopyBlocks, CopyDirection, CopyDone, Fences

from .driving import EPOCH

DIRECTIONS: tuple[CopyDirection, CopyDirection] = ("out", "in")


class Copied(NamedTuple):
    """A copy, and when it had ended by the host's clock."""

    ended_s: float
    done: CopyDone


class Lane:
    """One direction. `device` and `host` are its own blocks on each tier, as many of both, which it moves to and fro."""

    def __init__(
        self,
        executor: GpuExecutor,
        direction: CopyDirection,
        device: Sequence[BlockId],
        host: Sequence[BlockId],
        *,
        at_once: int,
    ) -> None:
        """`at_once` blocks make a copy."""
        self.device, self.host = device, host
        self.copied: list[Copied] = []
        self.last_sent = CopyId(0)
        self._executor = executor
        self._direction = direction
        self._at_once = at_once
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._error: BaseException | None = None

    def copy(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> CopyDone:
        """Copy blocks, and wait. Raises `RuntimeError` if it fails."""
        self.last_sent = CopyId(self.last_sent + 1)
        done = self._executor.copy_blocks(
            CopyBlocks(EPOCH, self.last_sent, self._direction, Fences(), list(sources), list(targets))
        )
        if not done.ok:
            raise RuntimeError(f"a copy {self._direction} failed: {done.reason}")
        self.copied.append(Copied(time.perf_counter(), done))
        return done

    def start(self) -> None:
        """Be busy from here on."""
        self._is_busy = True
        self._thread = threading.Thread(target=self._serve, name=f"lane-{self._direction}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Be idle. Raises what a copy raised."""
        self._is_busy = False
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        sources, targets = (self.device, self.host) if self._direction == "out" else (self.host, self.device)
        first = 0
        try:
            while self._is_busy:
                self.copy(sources[first : first + self._at_once], targets[first : first + self._at_once])
                first = (first + self._at_once) % len(sources)
        except BaseException as error:  # raised where somebody waits for the lane
            self._error = error


def busy(lanes: Sequence[Lane], work: Callable[[], None]) -> list[list[Copied]]:
    """Do `work` while all of `lanes` are busy; what each copied meanwhile."""
    before = [len(lane.copied) for lane in lanes]
    for lane in lanes:
        lane.start()
    try:
        work()
    finally:
        for lane in lanes:
            lane.stop()
    return [lane.copied[first:] for lane, first in zip(lanes, before, strict=True)]


def rate(copies: Sequence[Copied]) -> float:
    """Bytes a second while a lane copied."""
    return sum(one.done.num_bytes for one in copies) / max(sum(one.done.seconds for one in copies), 1e-9)


def seconds_within(copies: Sequence[Copied], began_s: float, ended_s: float) -> float:
    """Of the seconds that copies took, those between two times. A copy ended a moment before it was answered."""
    return sum(max(0.0, min(one.ended_s, ended_s) - max(one.ended_s - one.done.seconds, began_s)) for one in copies)
