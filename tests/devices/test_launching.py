"""A device that computes by itself: steps are launched while one runs, and answered in their order."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from repertory.actors.devices.compute import ComputeThread
from repertory.gpu.executor import LaunchingExecutor
from repertory.protocol.capacity import Capacity
from repertory.protocol.ids import Epoch, StepId
from repertory.protocol.messages import CopyBlocks, CopyDone, Fences, RunStep, StepDone, StepFailed
from repertory.tests.devices.work import PATIENCE_S


class Pending:
    def __init__(self, device: SlowDevice, step: RunStep) -> None:
        self._device, self._step = device, step

    def result(self) -> StepDone:
        assert self._device.may_end[self._step.step_id].wait(PATIENCE_S)
        if self._step.step_id in self._device.raising_at_the_end:
            raise RuntimeError(f"step {self._step.step_id} burnt")
        return StepDone(self._step.epoch, self._step.step_id, [], [], 0.0)


class SlowDevice:
    """Implements `LaunchingExecutor`. Steps end when they may."""

    capacity = Capacity("slow", 2, 0, 1, 1, 1, 1)
    num_sequences = 0
    watch = None

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.news = threading.Condition()
        self.may_end = {step_id: threading.Event() for step_id in range(1, 9)}
        self.raising_at_launch: set[int] = set()
        self.raising_at_the_end: set[int] = set()
        self.is_closed = False

    def launch_step(self, step: RunStep) -> Pending:
        with self.news:
            self.launched.append(step.step_id)
            self.news.notify_all()
        if step.step_id in self.raising_at_launch:
            raise ValueError(f"step {step.step_id} does not fit")
        return Pending(self, step)

    def wait_launched(self, count: int) -> None:
        with self.news:
            assert self.news.wait_for(lambda: len(self.launched) >= count, PATIENCE_S)

    def run_step(self, step: RunStep) -> StepDone:
        raise NotImplementedError

    def copy_blocks(self, copy: CopyBlocks) -> CopyDone:
        raise NotImplementedError

    def interrupt(self) -> None:
        for event in self.may_end.values():
            event.set()

    def close(self) -> None:
        self.is_closed = True


def step(step_id: int) -> RunStep:
    return RunStep(Epoch(1), StepId(step_id), Fences(), [], [], [], [])


class Company:
    def __init__(self, device: SlowDevice) -> None:
        self.device = device
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.thread = ComputeThread(lambda: device, self.answers.put_nowait)

    async def answer(self) -> Any:
        return await asyncio.wait_for(self.answers.get(), PATIENCE_S)

    async def aclose(self) -> None:
        self.device.interrupt()
        await self.thread.aclose()
        assert self.device.is_closed


async def opened(device: SlowDevice) -> Company:
    company = Company(device)
    await company.thread.start()
    return company


async def test_the_next_step_is_launched_while_one_runs_and_both_are_answered_in_order() -> None:
    device = SlowDevice()
    assert isinstance(device, LaunchingExecutor)
    company = await opened(device)
    company.thread.send(step(1))
    company.thread.send(step(2))
    await asyncio.to_thread(device.wait_launched, 2)
    device.may_end[2].set()
    assert company.answers.empty()
    device.may_end[1].set()
    assert [(await company.answer()).step_id for _ in range(2)] == [1, 2]
    await company.aclose()


@pytest.mark.parametrize("where", ["raising_at_launch", "raising_at_the_end"])
async def test_a_step_that_fails_is_answered_behind_those_before_it_and_nothing_is_after_it(where: str) -> None:
    device = SlowDevice()
    getattr(device, where).add(2)
    company = await opened(device)
    company.thread.send(step(1))
    company.thread.send(step(2))
    await asyncio.to_thread(device.wait_launched, 2)
    device.interrupt()
    first, second = await company.answer(), await company.answer()
    assert isinstance(first, StepDone) and first.step_id == 1
    assert isinstance(second, StepFailed) and second.step_id == 2 and "step 2" in second.problem.message
    company.thread.send(step(3))
    await company.aclose()
    assert device.launched == [1, 2]
    assert company.answers.empty()


async def test_at_the_end_what_is_launched_is_waited_for_and_what_is_not_is_dropped() -> None:
    device = SlowDevice()
    company = await opened(device)
    company.thread.send(step(1))
    await asyncio.to_thread(device.wait_launched, 1)
    ending = asyncio.ensure_future(company.thread.aclose())
    await asyncio.sleep(0)
    assert not device.is_closed
    device.may_end[1].set()
    await ending
    assert device.is_closed and (await company.answer()).step_id == 1
