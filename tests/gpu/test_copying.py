"""How a copy ends: well, as a failed copy, or with the device."""

from __future__ import annotations

from typing import Any

import pytest

from repertory.gpu.copying import carry_out
from repertory.gpu.timelines import FencesClosedError, Timelines
from repertory.protocol.capacity import Capacity
from repertory.protocol.messages import CopyBlocks, CopyDone, Fences
from repertory.tests.gpu.threads import PATIENCE_S, begin, until

CAPACITY = Capacity("none", 8, 4, block_size=4, block_bytes=100, vocab_size=10, max_model_len=10)


class Device:
    """Four host blocks, eight device blocks, and a memory of what was moved."""

    def __init__(self) -> None:
        self.timelines = Timelines()
        self.moved: list[CopyBlocks] = []
        self.error: BaseException | None = None

    def run(self, copy: CopyBlocks) -> CopyDone:
        return carry_out(copy, self.timelines, CAPACITY, self.move)

    def move(self, copy: CopyBlocks) -> None:
        self.moved.append(copy)
        if self.error is not None:
            raise self.error


def copy_of(sources: list[Any], targets: list[Any], direction: Any = "out", **more: Any) -> CopyBlocks:
    columns = {"direction": direction, "sources": sources, "targets": targets}
    return CopyBlocks(**{"epoch": 1, "copy_id": 1, "after": Fences(), **columns, **more})


@pytest.fixture
def device() -> Device:
    return Device()


def test_a_copy_says_what_it_moved_and_how_long_that_took(device: Device) -> None:
    done = device.run(copy_of([7, 0], [3, 0]))
    assert (done.ok, done.reason, done.num_bytes, done.waited_s) == (True, "", 200, 0.0)
    assert (done.epoch, done.copy_id, done.direction) == (1, 1, "out")
    assert done.seconds > 0
    assert device.timelines.completed == Fences(copy_out=1)  # type: ignore[arg-type]


def test_each_direction_has_a_timeline_of_its_own(device: Device) -> None:
    device.run(copy_of([0], [1], "in", copy_id=5))
    assert device.timelines.completed == Fences(copy_in=5)  # type: ignore[arg-type]


def test_nothing_to_copy_is_copied_well(device: Device) -> None:
    done = device.run(copy_of([], []))
    assert (done.ok, done.num_bytes) == (True, 0)


@pytest.mark.parametrize(
    ("sources", "targets", "direction", "said"),
    [
        ([8], [0], "out", "block 8 of a device pool of 8"),
        ([0], [4], "out", "block 4 of a host pool of 4"),
        ([4], [0], "in", "block 4 of a host pool of 4"),
        ([0], [8], "in", "block 8 of a device pool of 8"),
        ([0, -1], [0, 1], "out", "block -1"),
        ([0], [1 << 62], "in", "block 4611686018427387904"),
        ([0, 1], [0], "out", "2 sources and 1 targets"),
        ([], [0], "in", "0 sources and 1 targets"),
    ],
)
def test_a_copy_between_blocks_that_are_not_there_fails_and_touches_nothing(
    device: Device, sources: list[int], targets: list[int], direction: str, said: str
) -> None:
    done = device.run(copy_of(sources, targets, direction))
    assert not done.ok
    assert said in done.reason
    assert done.num_bytes == 0
    assert device.moved == []
    lane = f"copy_{direction}"
    assert getattr(device.timelines.completed, lane) == 1


@pytest.mark.parametrize("error", [OSError("bus error"), RuntimeError(), MemoryError()])
def test_a_move_that_raises_is_a_failed_copy_and_completes_its_fence(device: Device, error: Exception) -> None:
    device.error = error
    done = device.run(copy_of([1], [1]))
    assert (done.ok, done.num_bytes) == (False, 0)
    assert type(error).__name__ in done.reason
    assert device.timelines.completed == Fences(copy_out=1)  # type: ignore[arg-type]


def test_what_is_no_exception_gets_through_and_completes_the_fence_all_the_same(device: Device) -> None:
    device.error = SystemExit()
    with pytest.raises(SystemExit):
        device.run(copy_of([1], [1]))
    assert device.timelines.completed == Fences(copy_out=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("fence", [3, 4])
def test_a_copy_that_waits_for_itself_or_a_later_one_is_refused(device: Device, fence: int) -> None:
    with pytest.raises(ValueError, match=f"copy in 3 waits for number {fence} of its lane"):
        device.run(copy_of([1], [1], "in", copy_id=3, after=Fences(copy_in=fence)))  # type: ignore[arg-type]


def test_a_copy_moves_nothing_before_its_fences_are_met_and_says_how_long_it_waited(device: Device) -> None:
    lane = begin(lambda: device.run(copy_of([1], [1], after=Fences(2, 0, 1))))  # type: ignore[arg-type]
    until(lambda: device.timelines.num_waiting == 1)
    device.timelines.complete("copy_in", 1)
    device.timelines.complete("step", 1)
    assert device.moved == []
    device.timelines.complete("step", 2)
    done = lane.result(PATIENCE_S)
    assert done.ok
    assert done.waited_s > 0
    assert len(device.moved) == 1


def test_a_copy_whose_fences_are_never_met_ends_when_the_device_is_closed(device: Device) -> None:
    lane = begin(lambda: device.run(copy_of([1], [1], after=Fences(2))))  # type: ignore[arg-type]
    until(lambda: device.timelines.num_waiting == 1)
    device.timelines.close()
    assert isinstance(lane.exception(PATIENCE_S), FencesClosedError)
    assert device.moved == []
