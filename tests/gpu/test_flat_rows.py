"""The columns of a step's rows, against a plain loop."""

from __future__ import annotations

import random

import numpy as np
import pytest

from repertory.gpu.flat_rows import flat_rows
from repertory.gpu.slots import Row, Slot
from repertory.protocol.ids import BlockId, SequenceId
from repertory.protocol.messages import NewRow
from repertory.protocol.sampling import SamplingParams

NUM_BLOCKS = 60


def row_of(draw: random.Random, number: int, block_size: int) -> Row:
    """Somewhere in a sequence of up to 40 tokens, whose table may be longer than the row needs."""
    length = draw.randint(1, 40)
    table = [BlockId(block) for block in draw.sample(range(NUM_BLOCKS), -(-length // block_size) + draw.randint(0, 2))]
    slot = Slot(NewRow(SequenceId(number), draw.choices(range(100), k=length), length, SamplingParams(), table))
    start = draw.randrange(length)
    return Row(slot, start, draw.randint(start + 1, length), 1)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 9])
def test_every_token_is_where_its_table_says(num_rows: int, block_size: int) -> None:
    draw = random.Random(num_rows)
    rows = [row_of(draw, number, block_size) for number in range(num_rows)]
    flat = flat_rows(rows, num_blocks=NUM_BLOCKS, block_size=block_size)
    tokens = [(row.slot, position) for row in rows for position in range(row.start, row.end)]
    assert flat.token_ids.tolist() == [slot.token_ids[position] for slot, position in tokens]
    assert flat.positions.tolist() == [position for _, position in tokens]
    assert flat.blocks.tolist() == [slot.block_table[position // block_size] for slot, position in tokens]
    assert flat.offsets.tolist() == [position % block_size for _, position in tokens]
    assert all(
        np.issubdtype(column.dtype, np.integer) for column in (flat.token_ids, flat.positions, flat.blocks, flat.offsets)
    )
    assert np.diff(flat.first_tokens).tolist() == [row.end - row.start for row in rows]
    assert np.diff(flat.first_blocks).tolist() == [-(-row.end // block_size) for row in rows]
    for row, first, after in zip(rows, flat.first_blocks, flat.first_blocks[1:], strict=False):
        assert flat.tables[first:after].tolist() == row.slot.block_table[: after - first]
