"""The rows of a step as flat arrays: what every device's plan is made from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .slots import Row

SharedGroups = Sequence[tuple[Sequence[int], int]]
"""As in `RunStep.shared_groups`: indices of rows, and the number of leading blocks that they share."""

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class FlatRows(NamedTuple):
    """Rows, one behind the other. `blocks` and `offsets` say where each token's key and value go.

    Row i has tokens [`first_tokens[i]`, `first_tokens[i + 1]`) and, in `tables`, entries [`first_blocks[i]`,
    `first_blocks[i + 1]`): the blocks up to its end.
    """

    token_ids: Ints
    positions: Longs
    blocks: Longs
    offsets: Longs
    tables: Ints
    first_tokens: list[int]
    first_blocks: list[int]


def flat_rows(rows: Sequence[Row], *, num_blocks: int, block_size: int) -> FlatRows:
    """Lay out `rows`. Raises `ValueError` for a block table that does not reach its row's end, `IndexError` for a block
    outside the pool: what computes checks nothing.
    """
    starts = np.array([row.start for row in rows], np.int64)
    counts = np.array([row.end for row in rows], np.int64) - starts
    needed = [-(-row.end // block_size) for row in rows]
    for row, blocks in zip(rows, needed, strict=True):
        if len(row.slot.block_table) < blocks:
            raise ValueError(
                f"sequence {row.slot.seq_id}: {len(row.slot.block_table)} blocks for a row that ends at token {row.end}"
            )
    parts = [row.slot.table(blocks) for row, blocks in zip(rows, needed, strict=True)]
    tables = np.concatenate(parts) if parts else np.empty(0, np.int32)
    check_range(tables, num_blocks, "block", "pool")
    ends = np.cumsum(counts)
    first_tokens = [0, *ends.tolist()]
    first_blocks = [0, *itertools.accumulate(needed)]
    positions = np.arange(first_tokens[-1]) + np.repeat(starts - (ends - counts), counts)
    first_block_of = np.repeat(np.array(first_blocks[:-1], np.int64), counts)
    return FlatRows(
        token_ids=_flat(row.slot.token_ids[row.start : row.end] for row in rows),
        positions=positions,
        blocks=tables[first_block_of + positions // block_size].astype(np.int64),
        offsets=positions % block_size,
        tables=tables,
        first_tokens=first_tokens,
        first_blocks=first_blocks,
    )


def shared_prefix(rows: Sequence[Row], members: Sequence[int], num_blocks: int, *, block_size: int) -> int:
    """Keys in the blocks that the rows `members` share: of `num_blocks` those that leave each row its own last token.

    Raises `ValueError` for a row that does not share them.
    """
    num_blocks = min([num_blocks, *((rows[i].end - 1) // block_size for i in members)])
    prefix = rows[members[0]].slot.block_table[:num_blocks] if members else []
    for i in members:
        if rows[i].slot.block_table[:num_blocks] != prefix:
            raise ValueError(f"sequence {rows[i].slot.seq_id} does not share its first {num_blocks} blocks with its group")
    return num_blocks * block_size


def check_range(values: Ints, limit: int, what: str, where: str) -> None:
    """Raise `IndexError` for a value outside [0, limit)."""
    if len(values) and (values.min() < 0 or values.max() >= limit):
        wrong = values[(values < 0) | (values >= limit)][0]
        raise IndexError(f"{what} {wrong} is outside the {where} of {limit}")


def _flat(lists: Iterable[Sequence[int]]) -> Ints:
    return np.array(list(itertools.chain.from_iterable(lists)), dtype=np.int32)
