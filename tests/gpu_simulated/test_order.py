"""Three threads with the right fences leave what one thread that does everything in turn leaves."""

from __future__ import annotations

import random
import threading
from typing import NamedTuple

import numpy as np
import pytest

from repertory.gpu.simulated import SimulatedExecutor
from repertory.protocol.messages import CopyBlocks, Fences, NewRow, RunStep
from repertory.protocol.sampling import SamplingParams
from repertory.tests.gpu.threads import PATIENCE_S, begin

GREEDY = SamplingParams(temperature=0.0)
NUM_DEVICE, NUM_HOST, SIZE = 12, 8, 2


class Touched(NamedTuple):
    """A block of one tier."""

    tier: str
    block: int


class Script:
    """Random steps and copies, each with the fences of every block that it reads or writes."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._last: dict[str, dict[Touched, int]] = {"step": {}, "copy_out": {}, "copy_in": {}}
        self._count = dict.fromkeys(self._last, 0)

    def operations(self, count: int) -> list[RunStep | CopyBlocks]:
        return [self._draw.choice((self._step, self._out, self._in))() for _ in range(count)]

    def _step(self) -> RunStep:
        """A new sequence writes and reads some blocks; the one before it is let go."""
        table = self._draw.sample(range(NUM_DEVICE), self._draw.randint(1, 4))
        number, after = self._issue("step", [Touched("device", block) for block in table])
        tokens = [self._draw.randrange(1000) for _ in range(len(table) * SIZE)]
        new = NewRow(number, tokens, len(tokens), GREEDY, table)
        return RunStep(1, number, after, [number], [0], [len(tokens)], [1], admitted=[new], released=[number - 1])

    def _out(self) -> CopyBlocks:
        return self._copy("out", NUM_DEVICE, NUM_HOST, "device", "host")

    def _in(self) -> CopyBlocks:
        return self._copy("in", NUM_HOST, NUM_DEVICE, "host", "device")

    def _copy(self, direction: str, num_sources: int, num_targets: int, source: str, target: str) -> CopyBlocks:
        count = self._draw.randint(1, 3)
        sources, targets = self._draw.sample(range(num_sources), count), self._draw.sample(range(num_targets), count)
        touched = [Touched(source, block) for block in sources] + [Touched(target, block) for block in targets]
        number, after = self._issue(f"copy_{direction}", touched)
        return CopyBlocks(1, number, direction, after, sources, targets)

    def _issue(self, timeline: str, touched: list[Touched]) -> tuple[int, Fences]:
        after = {name: max(last.get(one, 0) for one in touched) for name, last in self._last.items()}
        self._count[timeline] += 1
        self._last[timeline].update(dict.fromkeys(touched, self._count[timeline]))
        return self._count[timeline], Fences(**after)


def run(executor: SimulatedExecutor, operations: list[RunStep | CopyBlocks]) -> list[list[int]]:
    """Run operations in turn; return what the steps sampled."""
    tokens = []
    for operation in operations:
        if isinstance(operation, RunStep):
            tokens.append(executor.run_step(operation).token_ids)
        else:
            assert executor.copy_blocks(operation).ok
    return tokens


@pytest.mark.parametrize("seed", range(12))
def test_three_threads_leave_what_one_leaves(seed: int) -> None:
    sizes = {"num_device_blocks": NUM_DEVICE, "num_host_blocks": NUM_HOST, "block_size": SIZE, "vocab_size": 1000}
    operations = Script(seed).operations(300)
    serial = SimulatedExecutor(**sizes)
    expected = run(serial, operations)

    dawdle, draw = threading.Event(), random.Random(seed)

    def hook(_: RunStep | CopyBlocks) -> None:
        if draw.random() < 0.1:
            dawdle.wait(0.0005)

    threaded = SimulatedExecutor(**sizes, wait_for_fences=True, on_step=hook, on_copy=hook)
    lanes = [
        begin(lambda direction=direction: run(threaded, [one for one in operations if _lane(one) == direction]))
        for direction in ("out", "in")
    ]
    assert run(threaded, [one for one in operations if _lane(one) == "step"]) == expected
    for lane in lanes:
        lane.result(PATIENCE_S)
    for found, wanted in ((threaded.memory, serial.memory), (threaded.host_memory, serial.host_memory)):
        assert np.array_equal(found._kv, wanted._kv)
        assert np.array_equal(found._writers, wanted._writers)


def _lane(operation: RunStep | CopyBlocks) -> str:
    return "step" if isinstance(operation, RunStep) else operation.direction
