"""The token log and the comparison of runs."""

import pytest

from repertory.radix.tokens import TokenLog, common_tokens

EXTREMES = [0, 2**31 - 1, 1, 2**24, 255, 256, 0]


def test_ids_from_zero_to_the_largest_int32_come_back_as_they_went_in():
    log = TokenLog(EXTREMES[:3])
    for token in EXTREMES[3:]:
        log.append(token)
    assert log.tolist() == EXTREMES
    assert log.tolist(1, 3) == EXTREMES[1:3]
    assert len(log) == len(EXTREMES)
    assert log.buffer == TokenLog(EXTREMES).buffer


@pytest.mark.parametrize("token", [2**31, 2**32, 2**63, -(2**63)])
def test_an_id_that_is_no_int32_is_refused_at_construction_and_when_appended(token):
    with pytest.raises(OverflowError):
        TokenLog([token])
    log = TokenLog([5])
    with pytest.raises(OverflowError):
        log.append(token)
    assert log.tolist() == [5]


def test_a_block_is_cut_where_the_log_ends():
    log = TokenLog(range(10))
    assert TokenLog([4, 5, 6, 7]).buffer == log.block(1, 4)
    assert TokenLog([8, 9]).buffer == log.block(2, 4)
    assert log.block(3, 4) == b""


@pytest.mark.parametrize(
    ("left", "right", "count"),
    [
        ([], [1], 0),
        ([1], [1], 1),
        ([1, 2, 3], [1, 2], 2),
        ([0, 0], [0, 0, 0], 2),
        ([1, 256], [1, 512], 1),
        ([2**31 - 1, 0], [2**31 - 1, 2**24], 1),
        ([1], [257], 0),
        ([1, 7], [2, 7], 0),
    ],
)
def test_common_tokens_counts_whole_equal_tokens_and_no_bytes(left, right, count):
    assert common_tokens(TokenLog(left).buffer, TokenLog(right).buffer) == count
    assert common_tokens(TokenLog(right).buffer, bytes(TokenLog(left).buffer)) == count
