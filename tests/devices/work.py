"""Steps and copies by hand, for devices that are driven without a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from repertory.protocol.ids import BlockId, CopyId, Epoch, StepId
from repertory.protocol.messages import CopyBlocks, CopyDirection, Fences, RunStep

EPOCH = Epoch(3)
PATIENCE_S = 60.0


def fences(step: int = 0, copy_out: int = 0, copy_in: int = 0) -> Fences:
    """What an operation waits for."""
    return Fences(StepId(step), CopyId(copy_out), CopyId(copy_in))


def empty_step(number: int, copy_out: int = 0, copy_in: int = 0) -> RunStep:
    """A step without rows that waits for those copies."""
    return RunStep(EPOCH, StepId(number), fences(number - 1, copy_out, copy_in), [], [], [], [])


def copy_of(direction: CopyDirection, number: int, after: Fences | None = None, *, block: int = 0) -> CopyBlocks:
    """A copy of one block to the same number on the other tier."""
    return CopyBlocks(EPOCH, CopyId(number), direction, after or Fences(), [BlockId(block)], [BlockId(block)])


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a fact that nothing announces."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - a fact about another thread or process
            await asyncio.sleep(0.002)
