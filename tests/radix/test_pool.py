"""The pool: three hands, and no way from one to another that is not checked."""

import pytest

from repertory.radix.pool import FREE, IN_TREE, PRIVATE, BlockPool


def test_a_new_pool_hands_out_every_block_once_in_ascending_order():
    pool = BlockPool(5)
    assert [*pool.take(2), *pool.take(3)] == [0, 1, 2, 3, 4]
    assert pool.num_free == 0


def test_taking_nothing_takes_nothing():
    pool = BlockPool(2)
    assert pool.take(0) == []
    assert pool.num_free == 2


def test_the_first_block_given_back_is_handed_out_last():
    pool = BlockPool(3)
    taken = pool.take(3)
    pool.free_private(taken)
    assert pool.take(3) == [2, 1, 0]


def test_a_block_passes_through_all_three_hands():
    pool = BlockPool(1)
    hands = [pool.hand(0)]
    (block,) = pool.take(1)
    hands.append(pool.hand(block))
    pool.enter_tree([block])
    hands.append(pool.hand(block))
    pool.free_from_tree([block])
    hands.append(pool.hand(block))
    assert hands == [FREE, PRIVATE, IN_TREE, FREE]


@pytest.mark.parametrize("move", ["enter_tree", "free_private", "free_from_tree"])
def test_a_free_block_cannot_be_freed_or_entered(move):
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 1 is free"):
        getattr(pool, move)([1])
    assert pool.num_free == 2


def test_a_block_given_back_twice_in_one_call_is_caught():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    with pytest.raises(AssertionError, match="block 0 is free"):
        pool.free_private([block, block])


def test_a_private_block_is_not_the_trees_to_free_nor_the_reverse():
    pool = BlockPool(2)
    mine, trees = pool.take(2)
    pool.enter_tree([trees])
    with pytest.raises(AssertionError):
        pool.free_from_tree([mine])
    with pytest.raises(AssertionError):
        pool.free_private([trees])


def test_more_blocks_than_are_free_are_refused_whole():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 free"):
        pool.take(3)
    assert pool.num_free == 2


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        BlockPool(0)
