"""Blocks that a trace names, and the tokens that stand in for theirs: they compare alike."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repertory.actors.observing.block_names import BlockNames
from repertory.actors.simulation.contents import BlockContents
from repertory.protocol.errors import ValidationError
from repertory.protocol.trace import Named
from repertory.radix.tokens import TokenLog, common_tokens

BLOCK_SIZE = 3
logs = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 255, 256, 257, 65_536, 151_000]), min_size=1, max_size=10), min_size=1, max_size=12
)


def named(real, *, limit=1000, namespaces=None):
    names, places = BlockNames(BLOCK_SIZE, limit=limit), namespaces or [0] * len(real)
    found = [names.of(TokenLog(log).buffer, namespace) for log, namespace in zip(real, places, strict=True)]
    return found, names


def stand_ins(real, **options):
    found, names = named(real, **options)
    contents = BlockContents(names.take_new(), BLOCK_SIZE)
    return [contents.of(blocks) for blocks in found]


def buffer(log):
    return bytes(TokenLog(log).buffer)


@given(logs)
def test_stand_ins_share_as_much_and_stand_in_the_same_order(real):
    made = stand_ins(real)
    for i, one in enumerate(real):
        assert len(made[i]) == len(one)
        for j, other in enumerate(real):
            assert common_tokens(buffer(made[i]), buffer(made[j])) == common_tokens(buffer(one), buffer(other))
            assert (buffer(made[i]) < buffer(made[j])) == (buffer(one) < buffer(other))


def test_equal_logs_have_equal_names_and_other_namespaces_have_others():
    (one, same, apart), names = named([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]], namespaces=[0, 0, 1])
    assert one == same
    assert not set(one) & set(apart)
    assert (names.namespace(None), names.namespace("a"), names.namespace("b"), names.namespace("a")) == (0, 1, 2, 1)


def test_a_long_new_prompt_is_one_record():
    (blocks,), names = named([list(range(400))])
    assert blocks == list(range(134))
    assert [(record.first, record.count, record.num_tokens) for record in names.take_new()] == [(0, 134, 1)]


def test_what_is_remembered_is_bounded_and_what_was_used_last_stays():
    draw = random.Random(3)
    names = BlockNames(BLOCK_SIZE, limit=20)
    kept = names.of(TokenLog([1, 2, 3, 4, 5, 6]).buffer, 0)
    for _ in range(300):
        names.of(TokenLog([draw.randrange(1000) for _ in range(9)]).buffer, 0)
        assert names.of(TokenLog([1, 2, 3, 4, 5, 6]).buffer, 0) == kept
        assert len(names) <= 20


@given(st.data())
def test_blocks_that_are_remembered_together_compare_alike_whatever_was_forgotten_between_them(data):
    names, records, known = BlockNames(BLOCK_SIZE, limit=6), [], []
    tokens = st.sampled_from([0, 1, 256])
    for log in data.draw(st.lists(st.lists(tokens, min_size=3, max_size=3), min_size=1, max_size=40)):
        known.append((log, names.of(TokenLog(log).buffer, 0)))
        records += names.take_new()
    contents = BlockContents(records, BLOCK_SIZE)
    latest = {tuple(blocks): log for log, blocks in known}
    remembered = [(log, list(blocks)) for blocks, log in latest.items() if names.of(TokenLog(log).buffer, 0) == list(blocks)]
    for one, blocks in remembered[-3:]:
        for other, others in remembered[-3:]:
            assert common_tokens(buffer(contents.of(blocks)), buffer(contents.of(others))) == common_tokens(
                buffer(one), buffer(other)
            )


def test_records_that_contradict_each_other_are_refused():
    with pytest.raises(ValidationError, match="block 1 stands beside 7"):
        BlockContents([Named(first=0, parent=-1), Named(first=1, parent=-1, left=7)], BLOCK_SIZE)
    with pytest.raises(ValidationError, match="block 5 was never named"):
        BlockContents([Named(first=0, parent=-1)], BLOCK_SIZE).of([0, 5])
