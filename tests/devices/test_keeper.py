"""The keeper between the scheduler and one device after another: who is told what."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from repertory.actors.devices.device import OnAnswer
from repertory.actors.devices.keeper import DeviceKeeper
from repertory.protocol.capacity import Capacity
from repertory.protocol.config import EngineConfig
from repertory.protocol.ids import Epoch
from repertory.protocol.messages import CopyBlocks, CopyDone, DeviceLost, DeviceReady, RunStep, StepDone

from .work import copy_of, empty_step, until

CAPACITY = Capacity("none", 8, 4, block_size=4, block_bytes=100, vocab_size=10, max_model_len=10)


class FakeDevice:
    """Takes everything and answers when the test does."""

    def __init__(self, epoch: Epoch, on_answer: OnAnswer) -> None:
        self.epoch = epoch
        self.answer = on_answer
        self.sent: list[tuple[RunStep | CopyBlocks, float | None]] = []
        self.fate: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def open(self) -> Capacity:
        return CAPACITY

    def send(self, message: RunStep | CopyBlocks, predicted_s: float | None) -> None:
        self.sent.append((message, predicted_s))

    async def lost(self) -> str:
        return await self.fate

    async def aclose(self) -> None:
        pass


class Company:
    """A keeper, its devices, and the scheduler's inbox."""

    def __init__(self) -> None:
        self.devices: list[FakeDevice] = []
        self.inbox: list[Any] = []
        self.room = 99
        self.keeper = DeviceKeeper(self._make, EngineConfig(model="m"))
        self.keeper.report_to(self._post)

    def _make(self, epoch: Epoch, on_answer: OnAnswer) -> FakeDevice:
        self.devices.append(FakeDevice(epoch, on_answer))
        return self.devices[-1]

    def _post(self, message: Any) -> bool:
        if len(self.inbox) < self.room:
            self.inbox.append(message)
            return True
        return False


@pytest.fixture
async def company(log_lines: list[dict]) -> Company:
    company = Company()
    await company.keeper.open()
    return company


def copied(epoch: int, *, ok: bool = True) -> CopyDone:
    return CopyDone(epoch, 1, "out", 100, 0.1, ok=ok, reason="" if ok else "no room")  # type: ignore[arg-type]


def stepped(epoch: int) -> StepDone:
    return StepDone(epoch, 1, [1], [5], 0.1, num_sequences=4)  # type: ignore[arg-type]


async def test_steps_and_copies_go_to_the_device_of_their_epoch_in_order(company: Company) -> None:
    copy, step = replace(copy_of("out", 1), epoch=1), replace(empty_step(1), epoch=1)
    company.keeper.send(copy, 0.5)
    company.keeper.send(step)
    company.keeper.send(replace(copy, epoch=2), 0.5)
    assert company.devices[0].sent == [(copy, 0.5), (step, None)]


async def test_answers_reach_the_scheduler_in_order_and_none_is_lost_when_its_inbox_is_full(company: Company) -> None:
    company.room = 1
    answers = [copied(1), stepped(1), copied(1)]
    for answer in answers:
        company.devices[0].answer(answer)
    assert company.inbox == answers[:1]
    company.room = 99
    await until(lambda: len(company.inbox) == 3)
    assert company.inbox == answers
    assert company.keeper.num_sequences == 4


async def test_a_copy_that_failed_is_delivered_and_logged(company: Company, log_lines: list[dict]) -> None:
    company.devices[0].answer(copied(1, ok=False))
    assert company.inbox == [copied(1, ok=False)]
    (line,) = [line for line in log_lines if line["event"] == "copy.failed"]
    assert (line["epoch"], line["copy_id"], line["direction"], line["reason"]) == (1, 1, "out", "no room")


async def test_what_a_dead_device_says_reaches_nobody(company: Company) -> None:
    watching = asyncio.create_task(company.keeper.run())
    company.devices[0].fate.set_result("a copy in is overdue")
    await until(lambda: DeviceReady(Epoch(2)) in company.inbox)
    company.devices[0].answer(copied(1))
    company.devices[0].answer(stepped(1))
    company.devices[1].answer(copied(2))
    assert company.inbox == [DeviceLost(Epoch(1), "a copy in is overdue"), DeviceReady(Epoch(2)), copied(2)]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
