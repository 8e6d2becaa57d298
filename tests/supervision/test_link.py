"""The link to a device host, where it is pulled at from unusual sides: still a reason, and still an end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from repertory.actors.devices.process import ProcessDevice
from repertory.protocol.config import EngineConfig
from repertory.protocol.ids import BlockId, Epoch, SequenceId, StepId
from repertory.protocol.messages import CopyDone, Fences, NewRow, RunStep, StepDone
from repertory.protocol.sampling import SamplingParams

from .conftest import DEFAULTS, Hosts
from .faulty_host import COMMAND, Fault

pytestmark = pytest.mark.alone

FIRST_STEP = RunStep(
    Epoch(1),
    StepId(1),
    Fences(),
    [SequenceId(1)],
    [0],
    [3],
    [1],
    admitted=[NewRow(SequenceId(1), [5, 6, 7], 3, SamplingParams(temperature=0.0), [BlockId(0)])],
)


async def opened(hosts: Hosts, *faults: Fault, on_answer: Callable[[StepDone | CopyDone], None] = print) -> ProcessDevice:
    """One life of a device."""
    hosts.prepare(*faults)
    model = hosts.models["simulated"]
    config = EngineConfig(model=str(model), **DEFAULTS["simulated"])  # type: ignore[arg-type]
    device = ProcessDevice(Epoch(1), config, model, on_answer=on_answer, command=COMMAND)
    await device.open()
    return device


async def reason_of(device: ProcessDevice) -> str:
    async with asyncio.timeout(60):
        return await device.lost()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGRTMIN + 3], ids=["SIGTERM", "without a name"])
async def test_any_signal_that_ends_the_host_is_told_by_name_or_number(hosts: Hosts, number: int) -> None:
    device = await opened(hosts)
    os.kill(hosts.pids[0], number)
    assert f"ended with signal {'SIGTERM' if number == signal.SIGTERM else int(number)}" in await reason_of(device)
    await device.aclose()


async def test_an_answer_at_which_the_listener_fails_is_a_loss_and_not_a_silence(hosts: Hosts) -> None:
    def fail(done: StepDone | CopyDone) -> None:
        raise ZeroDivisionError("in the keeper")

    device = await opened(hosts, on_answer=fail)
    device.send(FIRST_STEP, None)
    assert "the link to the device host failed: ZeroDivisionError" in await reason_of(device)
    await device.aclose()


async def test_what_is_no_exception_in_a_step_is_reported_like_one(hosts: Hosts) -> None:
    device = await opened(hosts, Fault("panic"))
    device.send(FIRST_STEP, None)
    assert "step 1 failed: Panic: no exception" in await reason_of(device)
    await device.aclose()


async def test_a_close_that_is_interrupted_is_finished_by_the_next(hosts: Hosts) -> None:
    device = await opened(hosts)
    assert hosts.left
    os.kill(hosts.pids[0], signal.SIGSTOP)  # closing it takes a second
    closing = asyncio.create_task(device.aclose())
    for _ in range(5):
        await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await device.aclose()
    await hosts.check_nothing_is_left()
