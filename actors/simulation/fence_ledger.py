"""Who uses which block, from the messages alone: that every operation waits for all earlier users of what it touches.

Three timelines run their operations in order, each beside the others. An operation is certain to come after another if
that is earlier on its own timeline, if its `after` names it or a later one of that timeline, if one of those is certain
to come after it - or if the scheduler has been told that it has ended. So each operation has a *horizon*: for each
timeline the last operation that is certain to have ended when it begins (a vector clock). A block may be read after all
that wrote it, and written after all that read or wrote it.

The ledger keeps its own copy of every block table, from the deltas, as a device does. It knows nothing of the pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...protocol.ids import BlockId, SequenceId
from ...protocol.messages import CopyBlocks, CopyDone, Fences, RunStep, StepDone
from .violation import Violation

STEP, OUT, IN = range(3)
TIMELINES = ("step", "copy out", "copy in")
DEVICE, HOST = range(2)
TIERS = ("device", "host")
RULE = "fences"

Horizon = tuple[int, int, int]


class RowBlocks(NamedTuple):
    """The blocks of a row, in their order: all it reads, and from which place on it writes them too."""

    seq_id: SequenceId
    blocks: list[BlockId]
    first_written: int
    starts_inside: bool
    """Whether the first written block holds earlier tokens, which stay."""


class _User(NamedTuple):
    """An operation that is being sent."""

    timeline: int
    number: int
    horizon: Horizon


class _Users:
    """The last operation of each timeline that read a block, and that wrote it."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.reads = [0, 0, 0]
        self.writes = [0, 0, 0]


class FenceLedger:
    """One life of a device. Raises `Violation` at the first operation that might run too early."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._tables: dict[SequenceId, list[BlockId]] = {}
        self._users: tuple[dict[BlockId, _Users], dict[BlockId, _Users]] = ({}, {})  # by tier
        self._horizons: list[list[Horizon]] = [[(0, 0, 0)], [(0, 0, 0)], [(0, 0, 0)]]
        self._ended = [0, 0, 0]

    def sent(self, operation: RunStep | CopyBlocks) -> list[RowBlocks]:
        """An operation is on its way; gives the rows of a step with their blocks."""
        if isinstance(operation, CopyBlocks):
            self._copy(operation)
            return []
        return self._step(operation)

    def told(self, done: StepDone | CopyDone) -> None:
        """The scheduler has been told that an operation has ended."""
        if isinstance(done, StepDone):
            self._ended[STEP] = int(done.step_id)
        else:
            self._ended[OUT if done.direction == "out" else IN] = int(done.copy_id)

    def _step(self, step: RunStep) -> list[RowBlocks]:
        user = self._begin(STEP, int(step.step_id), step.after)
        self._apply(step)
        for copy in step.copies:
            self._use(user, DEVICE, [copy.source], writes=False)
            self._use(user, DEVICE, [copy.target], writes=True)
        rows = []
        for seq_id, start, count in zip(step.seq_ids, step.starts, step.num_tokens, strict=True):
            blocks = self._tables[seq_id][: -(-(start + count) // self._size)]
            first = start // self._size
            self._use(user, DEVICE, blocks[:first], writes=False)
            self._use(user, DEVICE, blocks[first:], writes=True)
            rows.append(RowBlocks(seq_id, blocks, first, start % self._size > 0))
        return rows

    def _apply(self, step: RunStep) -> None:
        for seq_id in step.released:
            self._tables.pop(seq_id, None)
        for new in step.admitted:
            self._tables[new.seq_id] = list(new.block_table)
        for edit in step.table_edits:
            self._tables[edit.seq_id][edit.first : edit.first + len(edit.block_ids)] = edit.block_ids

    def _copy(self, copy: CopyBlocks) -> None:
        user = self._begin(OUT if copy.direction == "out" else IN, int(copy.copy_id), copy.after)
        source, target = (DEVICE, HOST) if copy.direction == "out" else (HOST, DEVICE)
        self._use(user, source, copy.sources, writes=False)
        self._use(user, target, copy.targets, writes=True)

    def _begin(self, timeline: int, number: int, after: Fences) -> _User:
        """The next operation of a timeline, with its horizon."""
        named = (int(after.step), int(after.copy_out), int(after.copy_in))
        own = self._horizons[timeline]
        if number != len(own):
            raise Violation(RULE, f"{TIMELINES[timeline]} {number} follows number {len(own) - 1}")
        horizons = [own[-1]]
        for other, last in enumerate(named):
            if last >= len(self._horizons[other]):
                raise Violation(RULE, f"{TIMELINES[timeline]} {number} waits for {TIMELINES[other]} {last}, which was not sent")
            horizons.append(self._horizons[other][last])
        steps, outs, ins = (max(column) for column in zip(*horizons, named, self._ended, strict=True))
        horizon = (steps, outs, ins)
        reached = list(horizon)
        reached[timeline] = number
        own.append((reached[0], reached[1], reached[2]))
        return _User(timeline, number, horizon)

    def _use(self, user: _User, tier: int, blocks: Sequence[BlockId], *, writes: bool) -> None:
        table = self._users[tier]
        for block in blocks:
            users = table.get(block)
            if users is None:
                users = table[block] = _Users()
            for other in (STEP, OUT, IN):
                needed = max(users.writes[other], users.reads[other] if writes else 0)
                if needed > user.horizon[other] and other != user.timeline:
                    reached = ", ".join(f"{name} {last}" for name, last in zip(TIMELINES, user.horizon, strict=True))
                    does = f"{'writes' if writes else 'reads'} {TIERS[tier]} block {block}"
                    raise Violation(
                        RULE,
                        f"{TIMELINES[user.timeline]} {user.number} {does} and does not wait for {TIMELINES[other]} {needed}, "
                        f"which uses it: it waits up to {reached}",
                    )
            (users.writes if writes else users.reads)[user.timeline] = user.number
