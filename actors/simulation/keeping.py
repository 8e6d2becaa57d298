"""The device's keeper under the virtual clock: lives follow each other, each with a number, none hears of another.

The rules are the real ones, which are pure: what is overdue (`devices/overdue.py`), and how long to wait before the
next life (`devices/budget.py`). A device that died takes with it all that it was told and has not answered.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial

import msgspec

from ...gpu.simulated import SimulatedExecutor
from ...protocol.config import EngineConfig
from ...protocol.ids import Epoch
from ...protocol.messages import CopyBlocks, CopyDone, DeviceLost, DeviceReady, DeviceShared, RunStep, StepDone
from ..devices.budget import RestartBudget
from ..devices.overdue import Overdue, Patience
from .link import At
from .run import Operation, Span, VirtualDevice

LOOK_S = 0.25
NOTICE_S = 0.05
"""The longest that the end of a device host goes unnoticed."""
OPENING_S = 0.2
PATIENCE = Patience(least_s=1.0, factor=20.0, unpredicted_s=5.0)

ToScheduler = StepDone | CopyDone | DeviceShared | DeviceLost | DeviceReady


class VirtualKeeper:
    """Hands operations to the device that lives, and its answers to `tell`. `device` is None between two lives.

    `kills` says of a step whether the device dies of it.
    """

    def __init__(
        self,
        device: VirtualDevice,
        config: EngineConfig,
        *,
        at: At,
        clock: Callable[[], float],
        tell: Callable[[ToScheduler], None],
        kills: Callable[[RunStep], bool],
        draw: random.Random,
    ) -> None:
        self.device: VirtualDevice | None = device
        assert isinstance(device.executor, SimulatedExecutor), "a device that is made anew must be one whose sizes are known"
        self.executor = device.executor
        self.epoch = Epoch(1)
        self.budget = RestartBudget(config.max_restarts, config.restart_window_s)
        self._latency = device.latency
        self._at = at
        self._clock = clock
        self._tell = tell
        self._kills = kills
        self._draw = draw
        self._overdue = Overdue(PATIENCE)
        self._num_unanswered = 0
        self._is_looking = False
        self.is_spent = False
        """Whether there will be no other device: it has died too often."""

    def take(self, operation: Operation, predicted_s: float | None) -> None:
        """An operation arrives. One of a life that is over goes nowhere."""
        if self.device is None or operation.epoch != self.epoch:
            return
        now = self._clock()
        self._overdue.sent(operation, predicted_s, now)
        self._num_unanswered += 1
        self._look_later()
        span = self.device.issue(operation, now)
        if span.end < float("inf"):
            self._at(span.end, partial(self._end, operation, span))

    def hang(self, server: str) -> None:
        """A timeline of the device stands still from now on."""
        if self.device is not None:
            self.device.hang(server)

    def share(self) -> None:
        """Another process has come to use the device."""
        if self.device is not None:
            self._tell(DeviceShared(self.epoch, "the scenario says so"))

    def die(self, reason: str) -> None:
        """The device host is gone: noticed a little later."""
        if self.device is not None:
            self.device = None
            self._at(self._clock() + self._draw.random() * NOTICE_S, partial(self._bury, reason))

    # ---- pieces ---------------------------------------------------------------------------------

    def _end(self, operation: Operation, span: Span) -> None:
        if self.device is None or operation.epoch != self.epoch:
            return
        if isinstance(operation, RunStep) and self._kills(operation):
            self.die(f"step {operation.step_id} kills it")
            return
        done = self._carry_out(operation, span)
        self._num_unanswered -= 1
        self._overdue.answered(done, self._clock())
        if isinstance(done, StepDone) and done.token_ids:
            self.budget.on_progress()
        self._tell(done)

    def _carry_out(self, operation: Operation, span: Span) -> StepDone | CopyDone:
        device = self.executor
        done = device.copy_blocks(operation) if isinstance(operation, CopyBlocks) else device.run_step(operation)
        return msgspec.structs.replace(done, seconds=span.end - span.start, waited_s=span.waited_s)

    def _look_later(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._at(self._clock() + LOOK_S, self._look)

    def _look(self) -> None:
        self._is_looking = False
        if self.device is None:
            return
        reason = self._overdue.verdict(self._clock())
        if reason is not None:
            self.device = None
            self._bury(reason)
        elif self._num_unanswered:
            self._look_later()

    def _bury(self, reason: str) -> None:
        now = self._clock()
        self._tell(DeviceLost(self.epoch, reason))
        wait_s = self.budget.on_death(now)
        if wait_s is None:
            self.is_spent = True
            return
        self._at(now + wait_s + self._draw.random() * OPENING_S, self._open)

    def _open(self) -> None:
        self.epoch = Epoch(self.epoch + 1)
        self.executor = _as_new(self.executor)
        self.device = VirtualDevice(self.executor, self._latency)
        self._overdue = Overdue(PATIENCE)
        self._num_unanswered = 0
        self._tell(DeviceReady(self.epoch))


def _as_new(executor: SimulatedExecutor) -> SimulatedExecutor:
    """A device like it, as empty as that was at first."""
    return dataclasses.replace(executor, epoch=None)
