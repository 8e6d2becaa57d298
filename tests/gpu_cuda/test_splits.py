"""How contexts and shared runs are split, and when sharing pays: counts in, counts out."""

from __future__ import annotations

import pytest

from repertory.gpu.cuda.attention.splits import (
    MAX_SPLITS,
    MIN_SPLIT_KEYS,
    max_shared_states,
    max_states,
    num_splits,
    shared_splits,
    worth_sharing,
)

LLAMA_KEY_BYTES = 2 * 2 * 8 * 128


def splits_of(num_rows: int, max_context_len: int, *, num_kv_heads: int = 8, num_sms: int = 132) -> int:
    return num_splits(num_rows, num_kv_heads=num_kv_heads, max_context_len=max_context_len, num_sms=num_sms)


def test_one_row_is_split_until_all_multiprocessors_read() -> None:
    assert splits_of(1, 131072) == 66
    assert 66 * 8 == 4 * 132


def test_no_split_of_the_longest_context_has_fewer_keys_than_the_least() -> None:
    assert splits_of(1, 1) == 1
    assert splits_of(1, 2 * MIN_SPLIT_KEYS - 1) == 1
    assert splits_of(1, 2 * MIN_SPLIT_KEYS) == 2
    assert splits_of(1, 10 * MIN_SPLIT_KEYS + 5) == 10


def test_rows_that_fill_the_device_are_not_split() -> None:
    assert splits_of(65, 16384) == 2
    assert splits_of(66, 16384) == 1
    assert splits_of(256, 16384) == 1


def test_a_context_that_may_be_much_longer_than_the_others_is_split_all_the_same() -> None:
    assert splits_of(256, 16385) == 2
    assert splits_of(256, 131072) == 8
    assert splits_of(256, 1 << 20) == 8
    assert splits_of(4096, 131072) == 1


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8, 32])
@pytest.mark.parametrize("num_sms", [1, 16, 132])
def test_no_step_has_more_states_than_scratch_is_made_for(num_kv_heads: int, num_sms: int) -> None:
    for max_rows in (1, 7, 100, 300):
        room = max_states(max_rows, num_kv_heads=num_kv_heads, num_sms=num_sms)
        for rows in range(1, max_rows + 1):
            for context in (1, 300, 5000, 100_000, 10_000_000):
                splits = splits_of(rows, context, num_kv_heads=num_kv_heads, num_sms=num_sms)
                assert 1 <= splits <= MAX_SPLITS
                assert rows * splits <= room


def test_scratch_of_a_large_batch_is_small() -> None:
    """256 rows of an 8B model on an H100: 32 heads of 128 numbers of 4 bytes, and two more."""
    states = max_states(256, num_kv_heads=8, num_sms=132) + max_shared_states(256, num_heads=32, num_sms=132)
    assert states * 32 * 130 * 4 < 64 << 20


def test_runs_are_split_until_they_fill_the_device_alone() -> None:
    runs = [(4, 8192), (64, 8192), (4, 300)]
    assert shared_splits(runs, group=4, num_kv_heads=8, num_sms=132, room=10_000) == [32, 9, 1]


def test_states_of_runs_fit_into_the_room_whatever_the_runs_are() -> None:
    for runs in ([(2, 1 << 20)] * 16, [(16, 4096), (16, 4096)], [(32, 65536)], [(1, 512), (31, 100_000)]):
        for room in (32, 33, 50, 200):
            splits = shared_splits(runs, group=4, num_kv_heads=8, num_sms=132, room=room)
            assert min(splits) >= 1
            assert sum(members * count for (members, _), count in zip(runs, splits, strict=True)) <= room


@pytest.mark.parametrize(("num_members", "num_keys"), [(32, 410), (8, 1756), (2, 12289)])
def test_sharing_pays_when_it_saves_more_reads_than_its_launches_cost(num_members: int, num_keys: int) -> None:
    assert worth_sharing(num_members, num_keys, group=4, key_bytes=LLAMA_KEY_BYTES)
    assert not worth_sharing(num_members, num_keys - 1, group=4, key_bytes=LLAMA_KEY_BYTES)


def test_sharing_never_pays_for_one_row() -> None:
    assert not worth_sharing(1, 1 << 20, group=4, key_bytes=LLAMA_KEY_BYTES, costs_bytes=0)


def test_sharing_does_not_pay_where_a_tile_has_room_for_one_row_only() -> None:
    """64 query heads to a KV head: each member is a tile of its own, and reads the keys as it would alone."""
    assert not worth_sharing(16, 1 << 20, group=64, key_bytes=LLAMA_KEY_BYTES, costs_bytes=0)
