"""KV memory that remembers what was last written to each slot, and by whom.

A real pool answers every read with some numbers, right or wrong. This one compares each read with
what the reader must find, and raises with both owners at the first difference. So every mistake of
bookkeeping - a wrong table entry, a block handed on too early, a copy forgotten or cut short -
surfaces at the first row that would have attended to wrong KV.

The writer is told, not compared: a slot read by a sequence that did not write it is a shared prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...protocol.ids import BlockId, SequenceId
from .contents import HISTORY, JUNK, NAMESPACE, NUM_COLUMNS, POSITION, TOKEN, UNWRITTEN, Contents, Int64Array

NOBODY = -1
"""Writer of a slot that was never written."""

BYTES_PER_SLOT = (NUM_COLUMNS + 1) * 8
"""What a copy moves of a slot: its row and its writer."""


class MemoryFault(Exception):
    """A sequence met KV that is not its own, or memory that is not there.

    `sequence` is the one that reads (or, in a write conflict, writes second), `owner` the one that
    wrote what is there (None: nobody did, or there is no such slot), `block` and `offset` the slot.
    """

    def __init__(
        self,
        message: str,
        *,
        sequence: int | None = None,
        owner: int | None = None,
        block: int | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message)
        self.sequence = sequence
        self.owner = owner
        self.block = block
        self.offset = offset


class SimulatedMemory:
    """One tier's pool: `num_blocks` blocks of `block_size` slots.

    Every operation raises `MemoryFault` for a block id outside [0, num_blocks).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._kv: Int64Array = np.full((num_blocks, block_size, NUM_COLUMNS), UNWRITTEN, np.int64)
        self._writers: Int64Array = np.full((num_blocks, block_size), NOBODY, np.int64)
        self._written_in: Int64Array = np.zeros((num_blocks, block_size), np.int64)
        self._step = 1

    def begin_step(self) -> None:
        """Open a new step: from here on two writes to one slot must agree."""
        self._step += 1

    def write(self, block_table: Sequence[BlockId], contents: Contents, *, start: int, end: int, writer: SequenceId) -> None:
        """Write positions [start, end) of `contents` through `block_table`.

        Raises `MemoryFault` where the table has no block for a position, and where this step has
        written something else to the slot already.
        """
        blocks = self._blocks(block_table, end, writer)
        positions = np.arange(start, end)
        at = blocks[positions // self.block_size], positions % self.block_size
        new = contents.rows(start, end)
        again = self._written_in[at] == self._step
        if again.any():
            self._refuse_conflict(at, new, again, writer)
        self._kv[at] = new
        self._writers[at] = writer
        self._written_in[at] = self._step

    def read_back(self, block_table: Sequence[BlockId], contents: Contents, *, end: int, reader: SequenceId) -> Int64Array:
        """Read positions [0, end) through `block_table`; return the tokens found, int64 `[end]`.

        Raises `MemoryFault` at the first position that does not hold what `contents` says.
        """
        blocks = self._blocks(block_table, end, reader)
        found = self._kv[blocks].reshape(-1, NUM_COLUMNS)[:end]
        expected = contents.rows(0, end)
        if not np.array_equal(found, expected):
            position = int((found != expected).any(axis=1).argmax())
            raise self._misread(int(blocks[position // self.block_size]), expected[position], reader)
        tokens: Int64Array = found[:, TOKEN]
        return tokens

    def copy(self, source: BlockId, target: BlockId, num_tokens: int) -> None:
        """Copy the first `num_tokens` slots of `source` to `target`, their writers too. The rest of `target` stays.

        Raises `ValueError` for a count outside [1, block_size].
        """
        self._check_ids((source, target), None)
        if not 1 <= num_tokens <= self.block_size:
            raise ValueError(f"copy of block {source} to {target}: {num_tokens} tokens of a block of {self.block_size}")
        self._kv[target, :num_tokens] = self._kv[source, :num_tokens]
        self._writers[target, :num_tokens] = self._writers[source, :num_tokens]

    def copy_blocks_from(self, other: SimulatedMemory, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        """Copy block `sources[i]` of another tier, whole and whatever it holds, to block `targets[i]` of this one."""
        if not sources:
            return
        other._check_ids(sources, None)
        self._check_ids(targets, None)
        self._kv[targets] = other._kv[sources]
        self._writers[targets] = other._writers[sources]

    def spoil(self, block: BlockId, writer: int) -> None:
        """Leave junk in all of `block`, as a copy that failed half way does. `writer` is who left it."""
        self._check_ids((block,), None)
        self._kv[block] = JUNK
        self._writers[block] = writer

    def _blocks(self, block_table: Sequence[BlockId], end: int, sequence: SequenceId) -> Int64Array:
        """The blocks of positions [0, end), all checked."""
        needed = -(-end // self.block_size)
        used = block_table[:needed]
        if len(used) < needed:
            raise MemoryFault(
                f"sequence {sequence} has no block for position {len(used) * self.block_size}: "
                f"its table has {len(used)} blocks of {self.block_size}, and it reaches to position {end - 1}",
                sequence=sequence,
            )
        self._check_ids(used, sequence)
        return np.array(used, np.int64)

    def _check_ids(self, blocks: Sequence[BlockId], sequence: SequenceId | None) -> None:
        if min(blocks) < 0 or max(blocks) >= self.num_blocks:
            block = next(block for block in blocks if not 0 <= block < self.num_blocks)
            who = "a copy" if sequence is None else f"sequence {sequence}"
            raise MemoryFault(f"{who} names block {block} of a pool of {self.num_blocks}", sequence=sequence, block=block)

    def _misread(self, block: int, expected: Int64Array, reader: SequenceId) -> MemoryFault:
        position = int(expected[POSITION])
        offset = position % self.block_size
        found, writer = self._kv[block, offset], int(self._writers[block, offset])
        if found[TOKEN] == UNWRITTEN:
            there = "nothing was ever written there"
        elif found[TOKEN] == JUNK:
            there = f"junk is there, left by {writer}"
        else:
            there = f"there is {_show(found)}, written by sequence {writer}"
            if np.array_equal(found[:HISTORY], expected[:HISTORY]):
                there += ", after other tokens than the reader's"
        return MemoryFault(
            f"sequence {reader} reads position {position} in block {block}, offset {offset}: "
            f"expected {_show(expected)}; {there}",
            sequence=reader,
            owner=None if writer == NOBODY else writer,
            block=block,
            offset=offset,
        )

    def _refuse_conflict(
        self, at: tuple[Int64Array, Int64Array], new: Int64Array, again: NDArray[np.bool_], writer: SequenceId
    ) -> None:
        clash = again & (self._kv[at] != new).any(axis=1)
        if not clash.any():
            return
        first = int(clash.argmax())
        block, offset = int(at[0][first]), int(at[1][first])
        other = int(self._writers[block, offset])
        raise MemoryFault(
            f"sequences {other} and {writer} both write block {block}, offset {offset} in one step: "
            f"{_show(self._kv[block, offset])} and {_show(new[first])}",
            sequence=writer,
            owner=other,
            block=block,
            offset=offset,
        )


def _show(row: Int64Array) -> str:
    return f"token {row[TOKEN]} at position {row[POSITION]} of namespace {row[NAMESPACE]}"
