"""Steps as flat arrays, and which shared prefixes are worth a group."""

from __future__ import annotations

import random

import pytest

from repertory.gpu.cpu.plan import Plan, PoolShape, make_plan, worth_sharing
from repertory.gpu.slots import Row, Slot
from repertory.protocol.ids import BlockId, SequenceId
from repertory.protocol.messages import NewRow
from repertory.protocol.sampling import SamplingParams

POOL = PoolShape(num_blocks=500, block_size=4, block_stride=1000, token_stride=10)


def slot(seq_id: int, tokens: int, blocks: list[int]) -> Slot:
    return Slot(NewRow(SequenceId(seq_id), list(range(tokens)), tokens, SamplingParams(), [BlockId(b) for b in blocks]))


def plan(rows: list[Row], shared: list[tuple[list[int], int]] | None = None, *, query_group: int = 3) -> Plan:
    return make_plan(rows, shared or [], POOL, vocab_size=1000, query_group=query_group)


def test_tokens_positions_and_slots_follow_the_rows() -> None:
    rows = [Row(slot(1, 7, [5, 2]), 3, 6, 0), Row(slot(2, 9, [7, 8, 9]), 8, 9, 1)]
    found = plan(rows)
    assert found.token_ids.tolist() == [3, 4, 5, 8]
    assert found.positions.tolist() == [3, 4, 5, 8]
    assert found.slots.tolist() == [5030, 2000, 2010, 9000]
    assert found.tables.tolist() == [5, 2, 7, 8, 9]
    assert found.chunks.tolist() == [[0, 3, 6, 0]]
    assert found.decodes.tolist() == [[3, 9, 0, 2]]
    assert found.sample_at.tolist() == [3]
    assert (found.groups.shape, found.longest_run) == ((0, 4), 6)


def test_the_last_token_of_a_chunk_samples() -> None:
    assert plan([Row(slot(1, 7, [5, 2]), 3, 6, 1), Row(slot(2, 2, [1]), 0, 2, 1)]).sample_at.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("tokens", "blocks", "error"),
    [
        ([1, 2, 3, 4, 5], [1], ValueError),
        ([1, 2, 3], [500], IndexError),
        ([1, 2, 3], [-1], IndexError),
        ([1, 1000, 3], [1], IndexError),
        ([1, -1, 3], [1], IndexError),
    ],
)
def test_what_the_kernels_would_read_outside_is_refused(tokens: list[int], blocks: list[int], error: type[Exception]) -> None:
    bad = slot(1, len(tokens), blocks)
    bad.token_ids[:] = tokens
    with pytest.raises(error):
        plan([Row(bad, 0, len(tokens), 0)])


def decodes(count: int, prefix: list[int], *, tokens: int) -> list[Row]:
    own = [random.Random(i).choices(range(400, 500), k=-(-tokens // 4) - len(prefix)) for i in range(count)]
    return [Row(slot(i, tokens, prefix + blocks), tokens - 1, tokens, 1) for i, blocks in enumerate(own)]


def test_a_group_is_its_decode_rows_with_their_shared_keys() -> None:
    prefix = list(range(200))
    rows = [Row(slot(99, 8, [400, 401]), 0, 8, 0), *decodes(10, prefix, tokens=810)]
    found = plan(rows, [([0, 1, 2, 3, 4, 5, 6, 7, 8], 200)])
    assert found.groups.tolist() == [[0, 8, 800, 0]]
    assert found.members.tolist() == list(range(8))  # of the decode rows, which the chunk is not
    assert found.decodes[:, 2].tolist() == [800] * 8 + [0, 0]
    assert found.longest_run == 800


def test_a_group_leaves_each_row_its_own_token() -> None:
    rows = decodes(8, list(range(200)), tokens=800)
    found = plan(rows, [(list(range(8)), 200)])
    assert found.groups.tolist() == [[0, 8, 796, 0]]


def test_a_row_takes_part_in_one_group() -> None:
    rows = decodes(20, list(range(200)), tokens=810)
    found = plan(rows, [(list(range(10)), 200), (list(range(5, 20)), 190)])
    assert found.groups.tolist() == [[0, 10, 800, 0], [10, 10, 760, 0]]
    assert sorted(found.members.tolist()) == list(range(20))


def test_rows_that_do_not_share_what_they_are_said_to_share_are_refused() -> None:
    rows = decodes(8, list(range(200)), tokens=810)
    rows[3].slot.edit_table(100, [BlockId(499)])
    with pytest.raises(ValueError, match="sequence 3"):
        plan(rows, [(list(range(8)), 200)])


@pytest.mark.parametrize(
    ("rows", "keys", "query_group", "pays"),
    [(1, 4096, 3, False), (2, 4096, 3, False), (6, 1024, 3, True), (32, 1024, 3, True), (32, 32, 3, False), (8, 0, 1, False)],
)
def test_sharing_is_chosen_where_it_saves_more_than_it_costs(rows: int, keys: int, query_group: int, pays: bool) -> None:
    assert worth_sharing(rows, keys, query_group) == pays
