"""A step as the GPU wants it: decode rows before chunks, and the last step's tokens taken from the device.

A step may be launched before the host has seen what the one before it sampled. Such a token stands in its sequence's
log as `UNKNOWN`; the plan says at which place of that step's samples the device finds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...protocol.ids import SequenceId
from ..flat_rows import FlatRows, Ints, Longs, SharedGroups, check_range, flat_rows, shared_prefix
from ..slots import Row

UNKNOWN = -1
"""In a log: a token that has been drawn, and that only the device knows so far."""

NOWHERE = -1
"""Instead of a slot: what a padding row computes is not written."""


class PoolShape(NamedTuple):
    """What a plan has to know of the pool and the model."""

    num_blocks: int
    block_size: int
    vocab_size: int


class GpuPlan(NamedTuple):
    """The arrays of a step. Rows are numbered as the device has them; `rows` are the step's in that order.

    `from_sample` is the place among the last step's samples that holds a token, or -1 where `token_ids` does.
    `slots` are block * block_size + offset. `sample_at` and `sampling` are in the order of the step's rows, as samples are.
    """

    rows: list[Row]
    sampling: list[Row]
    token_ids: Ints
    from_sample: Ints
    positions: Longs
    slots: Longs
    block_tables: Ints
    """[rows, widest table], padded with 0."""
    context_lens: Ints
    query_starts: Ints
    sample_at: Longs
    num_decodes: int
    max_query_len: int
    max_context_len: int
    runs: list[tuple[list[int], int]]
    """Decode rows with a common prefix, and the number of keys in it."""

    @property
    def is_pure_decode(self) -> bool:
        """Whether every row is one token that a draw follows on, so that sample i belongs to row i."""
        return self.num_decodes == len(self.rows) == len(self.sampling)


def make_plan(rows: Sequence[Row], groups: SharedGroups, pool: PoolShape, pending: Mapping[SequenceId, int]) -> GpuPlan:
    """Lay out a step's rows. `pending` has the place of each sequence's token among the samples of the step that runs.

    Raises `ValueError` for a row that does not fit its block table and for a token that nobody knows,
    `IndexError` for a block or a token outside the pool or the vocabulary: the kernels check nothing.
    """
    counts = [row.end - row.start for row in rows]
    order = sorted(range(len(rows)), key=lambda i: counts[i] > 1)  # stable: decodes stay in their order
    ordered = [rows[i] for i in order]
    flat = flat_rows(ordered, num_blocks=pool.num_blocks, block_size=pool.block_size)
    from_sample = _from_sample(ordered, flat, pending)
    token_ids = np.where(from_sample >= 0, 0, flat.token_ids).astype(np.int32)
    check_range(token_ids, pool.vocab_size, "token", "vocabulary")
    place = {row: index for index, row in enumerate(order)}
    num_decodes = sum(count == 1 for count in counts)
    return GpuPlan(
        rows=ordered,
        sampling=[row for row in rows if row.samples],
        token_ids=token_ids,
        from_sample=from_sample,
        positions=flat.positions,
        slots=flat.blocks * pool.block_size + flat.offsets,
        block_tables=_padded(flat),
        context_lens=np.array([row.end for row in ordered], np.int32),
        query_starts=np.array(flat.first_tokens, np.int32),
        sample_at=np.array([flat.first_tokens[place[i] + 1] - 1 for i, row in enumerate(rows) if row.samples], np.int64),
        num_decodes=num_decodes,
        max_query_len=max(counts, default=0),
        max_context_len=max((row.end for row in rows), default=0),
        runs=_runs(ordered, groups, place, num_decodes=num_decodes, block_size=pool.block_size),
    )


def _from_sample(rows: Sequence[Row], flat: FlatRows, pending: Mapping[SequenceId, int]) -> Ints:
    places = np.full(len(flat.token_ids), -1, np.int32)
    for token in np.flatnonzero(flat.token_ids == UNKNOWN).tolist():
        slot = rows[int(np.searchsorted(flat.first_tokens, token, side="right")) - 1].slot
        if slot.seq_id not in pending:
            raise ValueError(f"sequence {slot.seq_id}: token {flat.positions[token]} is known to nobody")
        places[token] = pending[slot.seq_id]
    return places


def _padded(flat: FlatRows) -> Ints:
    widths = np.diff(flat.first_blocks)
    tables = np.zeros((len(widths), max(widths, default=0)), np.int32)
    tables[np.arange(tables.shape[1]) < widths[:, None]] = flat.tables
    return tables


def _runs(
    rows: Sequence[Row], groups: SharedGroups, place: Mapping[int, int], *, num_decodes: int, block_size: int
) -> list[tuple[list[int], int]]:
    runs: list[tuple[list[int], int]] = []
    taken: set[int] = set()
    for indices, num_blocks in groups:
        members = [place[i] for i in indices if place[i] < num_decodes and place[i] not in taken]
        if len(members) < 2:
            continue
        keys = shared_prefix(rows, members, num_blocks, block_size=block_size)
        if keys:
            runs.append((members, keys))
            taken.update(members)
    return runs
