"""A step as the C kernels want it: flat arrays, rows of one token apart from chunks, shared prefixes in groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..flat_rows import Ints, Longs, check_range, flat_rows, shared_prefix
from ..flat_rows import SharedGroups as SharedGroups
from ..slots import Row

QUERIES_AT_ONCE = 32
"""Query rows that the shared kernel computes together; fewer cost as much."""


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
    flat = flat_rows(rows, num_blocks=pool.num_blocks, block_size=pool.block_size)
    check_range(flat.token_ids, vocab_size, "token", "vocabulary")
    counts = [row.end - row.start for row in rows]
    first_tokens, first_blocks = flat.first_tokens, flat.first_blocks
    decode_rows = [i for i, count in enumerate(counts) if count == 1]
    groups, members, shared_keys = _group(rows, decode_rows, shared, pool.block_size, query_group)
    chunks = [(first_tokens[i], count, rows[i].end, first_blocks[i]) for i, count in enumerate(counts) if count > 1]
    return Plan(
        token_ids=flat.token_ids,
        positions=flat.positions,
        slots=flat.blocks * pool.block_stride + flat.offsets * pool.token_stride,
        tables=flat.tables,
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
        keys = shared_prefix(rows, inside, num_blocks, block_size=block_size)
        if not worth_sharing(len(inside), keys, query_group):
            continue
        groups.append((len(members), len(inside), keys, 0))
        members += [place[i] for i in inside]
        shared_keys.update(dict.fromkeys(inside, keys))
    return groups, members, shared_keys


def _table(rows: Iterable[tuple[int, int, int, int]]) -> Ints:
    return np.array(list(rows), dtype=np.int32).reshape(-1, 4)
