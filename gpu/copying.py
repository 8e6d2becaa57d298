"""A copy between the tiers, whichever device moves the bytes: checked, run after its fences, answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from ..protocol.capacity import Capacity
from ..protocol.errors import problem_of
from ..protocol.ids import BlockId
from ..protocol.messages import CopyBlocks, CopyDone
from .timelines import Timeline, Timelines


def carry_out(copy: CopyBlocks, timelines: Timelines, capacity: Capacity, move: Callable[[CopyBlocks], None]) -> CopyDone:
    """Implements `Executor.copy_blocks`: `move` moves the blocks, whose ids are in range, and raises where it cannot.

    Raises `ValueError` for a copy that waits for itself or for a later one of its lane, `FencesClosedError` for one
    whose fences are not met when the device is closed, and what `move` raises beyond `Exception`.
    """
    lane: Timeline = "copy_out" if copy.direction == "out" else "copy_in"
    fence = getattr(copy.after, lane)
    if fence >= copy.copy_id:
        raise ValueError(
            f"copy {copy.direction} {copy.copy_id} waits for number {fence} of its lane, which cannot come before it"
        )
    reason: str | None = None
    with timelines.operation(lane, copy.copy_id, copy.after) as waited_s:
        started = time.perf_counter()
        try:
            _check_blocks(copy, capacity)
            move(copy)
        except Exception as error:
            reason = problem_of(error).message
        seconds = time.perf_counter() - started
    done = CopyDone(copy.epoch, copy.copy_id, copy.direction, len(copy.sources) * capacity.block_bytes, seconds, waited_s)
    return done if reason is None else replace(done, num_bytes=0, ok=False, reason=reason)


def _check_blocks(copy: CopyBlocks, capacity: Capacity) -> None:
    if len(copy.sources) != len(copy.targets):
        raise ValueError(f"{len(copy.sources)} sources and {len(copy.targets)} targets")
    device, host = ("device", capacity.num_device_blocks), ("host", capacity.num_host_blocks)
    source, target = (device, host) if copy.direction == "out" else (host, device)
    _check_ids(copy.sources, *source)
    _check_ids(copy.targets, *target)


def _check_ids(blocks: Sequence[BlockId], tier: str, num_blocks: int) -> None:
    if blocks and not 0 <= min(blocks) <= max(blocks) < num_blocks:
        wrong = next(block for block in blocks if not 0 <= block < num_blocks)
        raise IndexError(f"block {wrong} of a {tier} pool of {num_blocks}")
