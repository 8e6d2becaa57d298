"""Decode rows that share leading blocks are told to the device, and only those."""

from __future__ import annotations

from repertory.actors.scheduling.sharing import SharedGroups
from repertory.protocol.ids import SequenceId, StepId
from repertory.radix.cache import KVCache
from repertory.radix.tokens import TokenLog

SIZE = 4


class Row:
    """As much of a sequence as the groups look at."""

    def __init__(self, cache: KVCache, seq_id: int, tokens: list[int]) -> None:
        self.seq_id = SequenceId(seq_id)
        self.holding = cache.open(self.seq_id, None)
        log = TokenLog(tokens)
        cache.begin_step(StepId(seq_id))
        found = cache.admit(self.holding, log)
        assert found is not None
        advance = cache.advance(self.holding, log, found)
        assert cache.grow(self.holding, len(tokens))
        cache.enter(self.holding, log, advance.num_computed, len(tokens))


def groups_of(prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    cache = KVCache(4096, SIZE)
    rows = [Row(cache, number, tokens) for number, tokens in enumerate(prompts, 1)]
    groups = SharedGroups(SIZE).of(rows)  # type: ignore[arg-type]
    for members, num_blocks in groups:
        tables = {tuple(rows[row].holding.block_table[:num_blocks]) for row in members}
        assert len(tables) == 1, "a group whose tables differ"
    assert len({row for members, _ in groups for row in members}) == sum(len(members) for members, _ in groups)
    return groups


def prompt(*runs: tuple[int, int]) -> list[int]:
    return [value for value, count in runs for _ in range(count)]


def test_rows_below_one_long_prefix_are_one_group() -> None:
    assert groups_of([prompt((1, 1024), (10 + i, 8)) for i in range(5)]) == [([0, 1, 2, 3, 4], 1024 // SIZE)]


def test_rows_without_anything_in_common_are_in_no_group() -> None:
    assert groups_of([prompt((i, 1024)) for i in range(1, 5)]) == []


def test_a_short_prefix_is_not_worth_a_group() -> None:
    assert groups_of([prompt((1, 8), (10 + i, 64)) for i in range(3)]) == []


def test_two_prefixes_make_two_groups() -> None:
    prompts = [prompt((1 + i % 2, 1024), (10 + i, 8)) for i in range(6)]
    assert sorted(groups_of(prompts)) == [([0, 2, 4], 256), ([1, 3, 5], 256)]


def test_a_deep_prefix_of_a_few_wins_over_a_shallow_one_of_all() -> None:
    prompts = [prompt((1, 64), (2 + i // 2, 2048), (10 + i, 8)) for i in range(4)]
    assert sorted(groups_of(prompts)) == [([0, 1], 528), ([2, 3], 528)]


def test_a_shallow_prefix_of_many_wins_over_a_deep_one_of_two() -> None:
    prompts = [prompt((1, 1024), (100 + i // 2, 64), (10 + i, 8)) for i in range(12)]
    assert groups_of(prompts) == [(list(range(12)), 256)]


def test_the_same_rows_are_not_looked_at_twice() -> None:
    cache = KVCache(4096, SIZE)
    rows = [Row(cache, number, prompt((1, 1024), (10 + number, 8))) for number in (1, 2)]
    groups = SharedGroups(SIZE)
    first = groups.of(rows)  # type: ignore[arg-type]
    assert groups.of(list(rows)) is first  # type: ignore[arg-type]
    assert groups.of(rows[:1]) == []  # type: ignore[arg-type]
