"""A device on threads: the worker's and the two lanes', and how they end whatever they wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from repertory.actors.devices import swap_manager, threads
from repertory.actors.devices.inline import InlineDevice
from repertory.gpu.simulated import SimulatedExecutor
from repertory.protocol.ids import Epoch
from repertory.protocol.messages import CopyBlocks, CopyDone, DeviceShared, RunStep, StepDone

from .work import PATIENCE_S, copy_of, empty_step, fences, until

NAMES = ("repertory-compute", "repertory-copy-out", "repertory-copy-in")


class Stand:
    """A device, its executor, and what it has answered."""

    def __init__(self, **knobs: Any) -> None:
        self.executor = SimulatedExecutor(num_host_blocks=8, wait_for_fences=True, **knobs)
        self.closed_beside: list[str] = []
        really = self.executor.close

        def close() -> None:
            self.closed_beside += [name for name in lanes_alive() if name != "repertory-compute"]
            really()

        self.executor.close = close  # type: ignore[method-assign]
        self.answers: list[StepDone | CopyDone] = []
        self.device = InlineDevice(Epoch(1), lambda: self.executor, self.answers.append)

    def send(self, *messages: RunStep | CopyBlocks) -> None:
        for message in messages:
            self.device.send(message, None)

    @property
    def names(self) -> list[str]:
        """What was answered, in order."""
        return [
            f"step {done.step_id}" if isinstance(done, StepDone) else f"{done.direction} {done.copy_id}"
            for done in self.answers
        ]

    @property
    def num_waiting(self) -> int:
        return self.executor._timelines.num_waiting


def lanes_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in NAMES]


Open = Callable[..., Awaitable[Stand]]


@pytest.fixture
async def stand() -> AsyncIterator[Open]:
    """Opens devices; afterwards no thread of theirs may be left, and no lane may have outlived its executor."""
    async with AsyncExitStack() as stack:

        async def make(**knobs: Any) -> Stand:
            found = Stand(**knobs)
            stack.push_async_callback(found.device.aclose)
            await found.device.open()
            stands.append(found)
            return found

        stands: list[Stand] = []
        yield make
    await until(lambda: not lanes_alive())
    assert not [name for found in stands for name in found.closed_beside]


async def test_steps_and_copies_are_answered(stand: Open) -> None:
    one = await stand()
    one.send(empty_step(1), copy_of("out", 1, fences(1)), copy_of("in", 1, fences(0, 1)), empty_step(2, 0, 1))
    await until(lambda: len(one.answers) == 4)
    # What waited for another may be answered a moment before it: only a lane has an order.
    assert sorted(one.names) == ["in 1", "out 1", "step 1", "step 2"]
    assert all(done.ok for done in one.answers if isinstance(done, CopyDone))


async def test_each_lane_keeps_its_order_and_waits_for_nobody_elses(stand: Open) -> None:
    held = threading.Event()
    one = await stand(on_copy=lambda copy: copy.direction == "in" or held.wait(PATIENCE_S))
    one.send(*(copy_of("out", number) for number in (1, 2, 3)), *(copy_of("in", number) for number in (1, 2, 3)), empty_step(1))
    await until(lambda: len(one.answers) == 4)
    assert [name for name in one.names if name.startswith("in")] == ["in 1", "in 2", "in 3"]
    held.set()
    await until(lambda: len(one.answers) == 7)
    assert one.names[4:] == ["out 1", "out 2", "out 3"]


async def test_a_failed_copy_is_an_answer_like_another_and_the_device_goes_on(stand: Open) -> None:
    one = await stand(fail_copies=lambda copy: copy.copy_id == 1)
    one.send(copy_of("out", 1), copy_of("out", 2, block=99), copy_of("out", 3), empty_step(1, 3))
    await until(lambda: len(one.answers) == 4)
    assert [done.ok for done in one.answers if isinstance(done, CopyDone)] == [False, False, True]


async def test_a_copy_that_is_refused_outright_loses_the_device(stand: Open) -> None:
    one = await stand()
    one.send(copy_of("in", 2))
    assert (
        await asyncio.wait_for(one.device.lost(), PATIENCE_S)
        == "copy in 2 failed: ValueError: copy in 2 follows number 0 of its lane"
    )


async def test_a_lane_that_dies_of_what_is_no_exception_loses_the_device(stand: Open) -> None:
    def observe(copy: CopyBlocks) -> None:
        raise SystemExit("out of here")

    one = await stand(on_copy=observe)
    one.send(copy_of("out", 1))
    assert "out of here" in await asyncio.wait_for(one.device.lost(), PATIENCE_S)


async def test_a_step_that_raises_loses_the_device_and_the_copies_behind_it_end_with_it(stand: Open) -> None:
    def observe(step: RunStep) -> None:
        raise OSError("on fire")

    one = await stand(on_step=observe)
    one.send(empty_step(1), copy_of("out", 1, fences(2)), empty_step(2))
    assert await asyncio.wait_for(one.device.lost(), PATIENCE_S) == "step 1 failed: OSError: on fire"
    await until(lambda: one.num_waiting == 1)
    assert one.names == []


async def test_closing_ends_copies_and_steps_that_wait_for_what_will_never_come(stand: Open) -> None:
    one = await stand()
    one.send(
        copy_of("out", 1, fences(9)), copy_of("out", 2), copy_of("in", 1, fences(0, 9)), empty_step(1, 0, 9), empty_step(2)
    )
    await until(lambda: one.num_waiting == 3)
    async with asyncio.timeout(PATIENCE_S / 2):
        await one.device.aclose()
        await one.device.aclose()
    await asyncio.sleep(0)
    assert one.names == []


async def test_closing_waits_for_the_copy_that_runs_and_drops_those_behind_it(stand: Open) -> None:
    running, held = threading.Event(), threading.Event()

    def observe(copy: CopyBlocks) -> None:
        running.set()
        assert held.wait(PATIENCE_S)

    one = await stand(on_copy=observe)
    one.send(copy_of("out", 1), copy_of("out", 2))
    await until(running.is_set)
    closing = asyncio.create_task(one.device.aclose())
    await asyncio.sleep(0)
    assert "repertory-compute" in lanes_alive(), "the executor lives as long as a lane uses it"
    held.set()
    await closing
    assert one.names == ["out 1"]


async def test_a_copy_that_is_stuck_does_not_keep_the_device_from_closing(
    stand: Open, monkeypatch: pytest.MonkeyPatch, log_lines: list[dict]
) -> None:
    monkeypatch.setattr(swap_manager, "GOODBYE_S", 0.02)
    running, held = threading.Event(), threading.Event()

    def observe(copy: CopyBlocks) -> None:
        running.set()
        held.wait(PATIENCE_S)

    one = await stand(on_copy=observe)
    one.send(copy_of("in", 1))
    await until(running.is_set)
    await one.device.aclose()
    assert lanes_alive() == ["repertory-copy-in"]
    (line,) = [line for line in log_lines if line["event"] == "lane.stuck"]
    assert line["direction"] == "in"
    assert one.closed_beside == ["repertory-copy-in"]
    one.closed_beside.clear()
    held.set()
    await until(lambda: not lanes_alive())


async def test_a_device_that_did_not_open_has_no_lanes(stand: Open) -> None:
    def fail() -> SimulatedExecutor:
        raise OSError("no device")

    device = InlineDevice(Epoch(1), fail, print)
    with pytest.raises(OSError, match="no device"):
        await device.open()
    device.send(copy_of("out", 1), None)
    await device.aclose()
    assert lanes_alive() == []


async def test_a_neighbour_on_the_device_is_reported_and_watching_ends_with_the_device():
    said = iter([None, "process 7 has come"])
    stand = Stand(watch=lambda: next(said, None))
    threads.WATCH_S, wait_s = 0.0, threads.WATCH_S
    try:
        await stand.device.open()
        await until(lambda: stand.answers)
    finally:
        threads.WATCH_S = wait_s
    assert stand.answers == [DeviceShared(Epoch(1), "process 7 has come")]
    await stand.device.aclose()
    assert stand.device._threads._watching is None
