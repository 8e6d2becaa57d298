"""A step as the C kernels want it: flat arrays, rows of one token apart from chunks, shared prefixes in groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..slots import Row

SharedGroups = Sequence[tuple[Sequence[int], int]]
"""As in `RunStep.shared_groups`: indices of rows, and the number of leading blocks that they share."""

QUERIES_AT_ONCE = 32
"""Query rows that the shared kernel computes together; fewer cost as much."""

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class Plan(NamedTuple):
    """The arrays of `Step` in `kernels/repertory.h`, where each is described."""

    token_ids: Ints
    positions: Longs
    slots: Longs
    tables: Ints
    decodes: Ints
    """[decode rows, 4]: token, context, shared, table."""
    chunks: Ints
    """[chunks, 4]: token, count, context, table."""
    groups: Ints
    """[groups, 4]: member, count, keys, unused."""
    members: Ints
    sample_at: Ints
    longest_run: int
    """Keys of the longest chunk or group: what scratch memory must hold."""


class PoolShape(NamedTuple):
    """Strides of a KV pool, in elements."""

    num_blocks: int
    block_size: int
    block_stride: int
    token_stride: int


def make_plan(rows: Sequence[Row], shared: SharedGroups, pool: PoolShape, *, vocab_size: int, query_group: int) -> Plan:
    """Lay out `rows`. `query_group` is the number of query heads to a KV head.

    Raises `ValueError` for a block table that does not reach its row's end and `IndexError` for a block or token
    outside the pool or the vocabulary: the kernels check nothing.
    """
    counts = [row.end - row.start for row in rows]
    needed = [-(-row.end // pool.block_size) for row in rows]
    for row, blocks in zip(rows, needed, strict=True):
        if len(row.slot.block_table) < blocks:
            raise ValueError(
                f"sequence {row.slot.seq_id}: {len(row.slot.block_table)} blocks for a row that ends at token {row.end}"
            )
    token_ids = _flat(row.slot.token_ids[row.start : row.end] for row in rows)
    tables = _flat(row.slot.block_table[:blocks] for row, blocks in zip(rows, needed, strict=True))
    _check_range(token_ids, vocab_size, "token", "vocabulary")
    _check_range(tables, pool.num_blocks, "block", "pool")
    first_tokens = [0, *itertools.accumulate(counts)]
    first_blocks = [0, *itertools.accumulate(needed)]
    positions = np.arange(len(token_ids)) + np.repeat(
        [row.start - at for row, at in zip(rows, first_tokens, strict=False)], counts
    )
    blocks_of = tables[np.repeat(first_blocks[:-1], counts) + positions // pool.block_size].astype(np.int64)
    slots = blocks_of * pool.block_stride + positions % pool.block_size * pool.token_stride
    decode_rows = [i for i, count in enumerate(counts) if count == 1]
    groups, members, shared_keys = _group(rows, decode_rows, shared, pool.block_size, query_group)
    chunks = [(first_tokens[i], count, rows[i].end, first_blocks[i]) for i, count in enumerate(counts) if count > 1]
    return Plan(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        tables=tables,
        decodes=_table((first_tokens[i], rows[i].end, shared_keys.get(i, 0), first_blocks[i]) for i in decode_rows),
        chunks=_table(chunks),
        groups=_table(groups),
        members=np.array(members, dtype=np.int32),
        sample_at=np.array([first_tokens[i + 1] - 1 for i, row in enumerate(rows) if row.samples], dtype=np.int32),
        longest_run=max([0, *(chunk[2] for chunk in chunks), *(group[2] for group in groups)]),
    )


def worth_sharing(num_rows: int, num_keys: int, query_group: int) -> bool:
    """Whether attending to `num_keys` once for `num_rows` rows beats doing so for each row.

    Measured: a pass of the shared kernel over some keys, for up to 32 query rows, takes as long as four single rows
    take for them (they find the keys in the cache that the first of them has read), and writing and reading a member's
    state as long as 64 keys.
    """
    passes = -(-num_rows * query_group // QUERIES_AT_ONCE)
    return num_keys * (num_rows - 4 * passes) > 64 * num_rows


def _group(
    rows: Sequence[Row], decode_rows: list[int], shared: SharedGroups, block_size: int, query_group: int
) -> tuple[list[tuple[int, int, int, int]], list[int], dict[int, int]]:
    """Groups of decode rows for which sharing pays, their members, and each member's number of shared keys by row."""
    groups: list[tuple[int, int, int, int]] = []
    members: list[int] = []  # indices of decode rows
    shared_keys: dict[int, int] = {}
    place = {row: index for index, row in enumerate(decode_rows)} if shared else {}
    for indices, num_blocks in shared:
        inside = [i for i in indices if i in place and i not in shared_keys]
        # At least the row's own token is left for its own part.
        num_blocks = min([num_blocks, *((rows[i].end - 1) // block_size for i in inside)])
        keys = num_blocks * block_size
        if not worth_sharing(len(inside), keys, query_group):
            continue
        prefix = rows[inside[0]].slot.block_table[:num_blocks]
        for i in inside:
            if rows[i].slot.block_table[:num_blocks] != prefix:
                raise ValueError(f"sequence {rows[i].slot.seq_id} does not share its first {num_blocks} blocks with its group")
        groups.append((len(members), len(inside), keys, 0))
        members += [place[i] for i in inside]
        shared_keys.update(dict.fromkeys(inside, keys))
    return groups, members, shared_keys


def _flat(lists: Iterable[Sequence[int]]) -> Ints:
    return np.array(list(itertools.chain.from_iterable(lists)), dtype=np.int32)


def _table(rows: Iterable[tuple[int, int, int, int]]) -> Ints:
    return np.array(list(rows), dtype=np.int32).reshape(-1, 4)


def _check_range(values: Ints, limit: int, what: str, where: str) -> None:
    if len(values) and (values.min() < 0 or values.max() >= limit):
        wrong = values[(values < 0) | (values >= limit)][0]
        raise IndexError(f"{what} {wrong} is outside the {where} of {limit}")
