"""Copies on the CPU executor: beside its steps, between them, and at its end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from repertory.gpu.cpu.executor import CpuExecutor
from repertory.gpu.timelines import FencesClosedError
from repertory.protocol.config import EngineConfig
from repertory.protocol.ids import BlockId
from repertory.protocol.messages import BlockCopy, CopyBlocks, Fences, RunStep
from repertory.tests.gpu.stepping import Stepper
from repertory.tests.gpu.threads import PATIENCE_S, begin, until

PROMPT = [9, 4, 7, 30, 11, 6, 200, 5, 5, 81, 300, 12, 13]


def make_executor(model_dir: Path, **settings: Any) -> CpuExecutor:
    defaults = {"block_size": 4, "num_device_blocks": 40, "num_host_blocks": 10, "num_threads": 1, "dtype": "float32"}
    executor = CpuExecutor(model_dir, config=EngineConfig(model=str(model_dir), **{**defaults, **settings}))
    executor._pool.blocks.fill_(float("nan"))
    return executor


def copy_of(
    direction: str, sources: list[int], targets: list[int], copy_id: int = 1, after: Fences | None = None
) -> CopyBlocks:
    return CopyBlocks(1, copy_id, direction, after or Fences(), sources, targets)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_that_was_on_the_host_goes_on_as_if_it_had_stayed(tiny_llama: Path, dtype: str, backend: str) -> None:
    settings = {"dtype": dtype, "attention_backend": backend}
    stayed = Stepper(make_executor(tiny_llama, **settings))
    stayed.add(1, PROMPT, room=16)
    expected = stayed.run(12)[1]

    stepper = Stepper(make_executor(tiny_llama, **settings))
    device = stepper.executor
    stepper.add(1, PROMPT, room=16)
    stepper.run(4)
    log, computed, table = stepper.logs[1], stepper.computed[1], stepper.tables[1]
    on_host = list(range(len(table)))[::-1]
    assert device.copy_blocks(copy_of("out", list(table), on_host)).ok
    stepper.release(1)
    stepper.step({})
    device._pool.blocks.fill_(float("nan"))
    back = [block for block in stepper.free if block not in table][: len(table)]
    done = device.copy_blocks(copy_of("in", on_host, back))
    assert done.ok
    assert done.num_bytes == len(table) * device.capacity.block_bytes
    stepper.add(1, log, room=0, num_prompt_tokens=len(PROMPT), computed=computed, shared=[BlockId(block) for block in back])
    assert expected[:4] + stepper.run(8)[1] == expected


def test_copies_run_beside_a_step_and_beside_each_other(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = make_executor(tiny_llama)
    stepper = Stepper(device)
    stepper.add(1, PROMPT)
    computing, go_on = threading.Event(), threading.Event()
    really = device._path.compute

    def compute(*args: Any, **named: Any) -> Any:
        computing.set()
        assert go_on.wait(PATIENCE_S)
        return really(*args, **named)

    monkeypatch.setattr(device._path, "compute", compute)
    step = begin(lambda: stepper.step({1: len(PROMPT)}))
    assert computing.wait(PATIENCE_S)
    assert device.copy_blocks(copy_of("out", [0], [3])).ok
    assert device.copy_blocks(copy_of("in", [3], [0])).ok
    held = begin(lambda: device.copy_blocks(copy_of("out", [1], [4], 2, Fences(1))))  # type: ignore[arg-type]
    until(lambda: device._timelines.num_waiting == 1)
    assert not step.done()
    go_on.set()
    assert step.result(PATIENCE_S).seq_ids == [1]
    assert held.result(PATIENCE_S).waited_s > 0


def test_a_step_waits_for_the_copies_it_names_and_does_not_count_that_as_its_own_time(tiny_llama: Path) -> None:
    device = make_executor(tiny_llama)
    device._pool.blocks.fill_(0)

    def run() -> Any:
        return device.run_step(RunStep(1, 1, Fences(0, 1, 1), [], [], [], [], copies=[BlockCopy(3, 5, 4)]))  # type: ignore[arg-type]

    step = begin(run)
    until(lambda: device._timelines.num_waiting == 1)
    device._host.blocks[0] = 7.0
    assert device.copy_blocks(copy_of("in", [0], [3])).ok
    until(lambda: device._timelines.num_waiting == 1)
    assert device.copy_blocks(copy_of("out", [9], [9])).ok
    done = step.result(PATIENCE_S)
    assert (device._pool.blocks[5] == 7.0).all(), "the step read what the copy had brought"
    assert done.waited_s > 0
    assert device.run_step(RunStep(1, 2, Fences(1), [], [], [], [])).waited_s == 0.0  # type: ignore[arg-type]


def test_a_step_that_raises_completes_its_fence(tiny_llama: Path) -> None:
    device = make_executor(tiny_llama)
    with pytest.raises(KeyError):
        device.run_step(RunStep(1, 1, Fences(), [5], [0], [1], [1]))  # type: ignore[arg-type]
    assert device.copy_blocks(copy_of("out", [0], [0], after=Fences(1))).ok  # type: ignore[arg-type]


@pytest.mark.parametrize(("sources", "targets"), [([40], [0]), ([0], [10]), ([0, 1], [0]), ([-1], [0])])
def test_a_copy_outside_the_pools_fails_alone(tiny_llama: Path, sources: list[int], targets: list[int]) -> None:
    device = make_executor(tiny_llama)
    assert not device.copy_blocks(copy_of("out", sources, targets)).ok
    assert device.copy_blocks(copy_of("out", [0], [0], 2, Fences(copy_out=1))).ok  # type: ignore[arg-type]


def test_without_a_host_tier_every_copy_fails(tiny_llama: Path) -> None:
    device = make_executor(tiny_llama, num_host_blocks=0)
    assert device.capacity.num_host_blocks == 0
    done = device.copy_blocks(copy_of("out", [0], [0]))
    assert (done.ok, done.reason) == (False, "block 0 of a host pool of 0")


def test_an_interrupt_ends_all_waiting(tiny_llama: Path) -> None:
    device = make_executor(tiny_llama)
    waiting = [
        begin(lambda: device.copy_blocks(copy_of("out", [0], [0], after=Fences(9)))),  # type: ignore[arg-type]
        begin(lambda: device.run_step(RunStep(1, 1, Fences(0, 0, 9), [], [], [], []))),  # type: ignore[arg-type]
    ]
    until(lambda: device._timelines.num_waiting == 2)
    device.interrupt()
    for waiter in waiting:
        assert isinstance(waiter.exception(PATIENCE_S), FencesClosedError)
    device.close()
    device.close()
