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

    Raises `FencesClosedError` for a copy whose fences are not met when the device is closed, and what `lane_of` raises and
    `move` raises beyond `Exception`.
    """
    with timelines.operation(lane_of(copy), copy.copy_id, copy.after) as waited_s:
        started = time.perf_counter()
        problem = checked_copy(copy, capacity)
        if problem is None:
            try:
                move(copy)
            except Exception as error:
                problem = problem_of(error).message
        seconds = time.perf_counter() - started
    return copy_answer(copy, capacity, seconds=seconds, waited_s=waited_s, problem=problem)


def lane_of(copy: CopyBlocks) -> Timeline:
    """The timeline of a copy. Raises `ValueError` for one that waits for itself or for a later one of its lane."""
    lane: Timeline = "copy_out" if copy.direction == "out" else "copy_in"
    fence = getattr(copy.after, lane)
    if fence >= copy.copy_id:
        raise ValueError(
            f"copy {copy.direction} {copy.copy_id} waits for number {fence} of its lane, which cannot come before it"
        )
    return lane


def copy_answer(copy: CopyBlocks, capacity: Capacity, *, seconds: float, waited_s: float, problem: str | None) -> CopyDone:
    """How a copy went; `problem` is what went wrong, None if nothing did."""
    done = CopyDone(copy.epoch, copy.copy_id, copy.direction, len(copy.sources) * capacity.block_bytes, seconds, waited_s)
    return done if problem is None else replace(done, num_bytes=0, ok=False, reason=problem)


def checked_copy(copy: CopyBlocks, capacity: Capacity) -> str | None:
    """What is wrong with the blocks that a copy names, in words; None if nothing is."""
    if len(copy.sources) != len(copy.targets):
        return f"{len(copy.sources)} sources and {len(copy.targets)} targets"
    device, host = ("device", capacity.num_device_blocks), ("host", capacity.num_host_blocks)
    source, target = (device, host) if copy.direction == "out" else (host, device)
    return _check_ids(copy.sources, *source) or _check_ids(copy.targets, *target)


def _check_ids(blocks: Sequence[BlockId], tier: str, num_blocks: int) -> str | None:
    if not blocks or 0 <= min(blocks) <= max(blocks) < num_blocks:
        return None
    wrong = next(block for block in blocks if not 0 <= block < num_blocks)
    return f"block {wrong} of a {tier} pool of {num_blocks}"
