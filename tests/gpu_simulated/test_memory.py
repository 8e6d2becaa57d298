"""The memory by itself: what each operation leaves, and what reading it back says."""

from __future__ import annotations

import pytest

from repertory.gpu.simulated.contents import HISTORY, NAMESPACE, POSITION, TOKEN, Contents
from repertory.gpu.simulated.memory import MemoryFault, SimulatedMemory


def written(memory: SimulatedMemory, table: list[int], tokens: list[int], *, writer: int = 1, namespace: int = 0) -> Contents:
    contents = Contents(namespace, tokens)
    memory.begin_step()
    memory.write(table, contents, start=0, end=len(tokens), writer=writer)
    return contents


def test_what_was_written_is_read_back_through_the_table():
    memory = SimulatedMemory(4, 2)
    contents = written(memory, [3, 0, 2], [7, 8, 9, 10, 11])
    assert memory.read_back([3, 0, 2], contents, end=5, reader=2).tolist() == [7, 8, 9, 10, 11]
    assert memory.read_back([3, 0], contents, end=3, reader=2).tolist() == [7, 8, 9]


def test_a_copy_leaves_the_rest_of_its_target_alone():
    memory = SimulatedMemory(4, 4)
    first = written(memory, [0], [1, 2, 3, 4], writer=1)
    written(memory, [1], [1, 2, 9, 9], writer=2)
    memory.copy(0, 1, 2)
    assert memory.read_back([1], first, end=2, reader=1).tolist() == [1, 2]
    with pytest.raises(MemoryFault, match="there is token 9 at position 2 of namespace 0, written by sequence 2"):
        memory.read_back([1], first, end=3, reader=1)


def test_a_copy_is_a_snapshot_and_keeps_the_writer():
    memory = SimulatedMemory(4, 2)
    first = written(memory, [0], [1, 2], writer=1)
    memory.copy(0, 1, 2)
    written(memory, [0], [5, 6], writer=2)
    assert memory.read_back([1], first, end=2, reader=3).tolist() == [1, 2]
    with pytest.raises(MemoryFault) as caught:
        memory.read_back([1], Contents(0, [1, 3]), end=2, reader=3)
    assert (caught.value.owner, caught.value.offset) == (1, 1)


def test_a_spoiled_block_is_junk_until_it_is_written_again():
    memory = SimulatedMemory(2, 2)
    contents = written(memory, [0], [1, 2])
    memory.spoil(0, 9)
    with pytest.raises(MemoryFault, match="junk is there, left by 9"):
        memory.read_back([0], contents, end=1, reader=1)
    written(memory, [0], [1, 2])
    assert memory.read_back([0], contents, end=2, reader=1).tolist() == [1, 2]


def test_writes_of_one_step_must_agree_and_those_of_two_need_not():
    memory = SimulatedMemory(2, 2)
    written(memory, [0], [1, 2], writer=1)
    memory.write([0], Contents(0, [1, 2]), start=0, end=2, writer=2)
    with pytest.raises(MemoryFault, match="sequences 2 and 3 both write block 0, offset 1"):
        memory.write([0], Contents(0, [1, 3]), start=0, end=2, writer=3)
    memory.begin_step()
    memory.write([0], Contents(0, [1, 3]), start=0, end=2, writer=3)


def test_contents_do_not_depend_on_how_they_grew():
    tokens = list(range(300, 0, -1))
    whole, grown = Contents(5, tokens), Contents(5, tokens[:1])
    for start, end in ((1, 2), (2, 70), (70, 70), (70, 299), (299, 300)):
        grown.extend(tokens[start:end])
    assert len(whole) == len(grown) == 300
    assert (whole.rows(0, 300) == grown.rows(0, 300)).all()
    assert whole.tokens().tolist() == tokens
    assert whole.rows(3, 4)[0, [TOKEN, POSITION, NAMESPACE]].tolist() == [297, 3, 5]


def test_equal_prefixes_have_equal_histories_and_any_change_shows_in_all_that_follows():
    base = list(range(40))
    rows = Contents(0, base).rows(0, 40)[:, HISTORY]
    for changed in range(40):
        other = Contents(0, [*base[:changed], 99, *base[changed + 1 :]]).rows(0, 40)[:, HISTORY]
        assert (rows == other).tolist() == [True] * changed + [False] * (40 - changed)
    swapped = Contents(0, [1, 0, *base[2:]]).rows(0, 40)[:, HISTORY]
    assert not (rows == swapped).any()


def test_histories_of_token_zero_count_how_many_there_were():
    histories = Contents(0, [0] * 200).rows(0, 200)[:, HISTORY].tolist()
    assert len(set(histories)) == 200
