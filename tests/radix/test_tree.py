"""The tree alone: matching, locking, splitting, growing, evicting."""

import pytest

from repertory.radix.pool import FREE, BlockPool
from repertory.radix.tokens import TokenLog
from repertory.radix.tree import PrefixTree


class Forest:
    """A tree over a pool, with runs entered as a sequence would enter them."""

    def __init__(self, num_blocks=32, block_size=4):
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool, block_size)

    def match(self, tokens, limit=None, namespace="a"):
        limit = len(tokens) if limit is None else limit
        return self.tree.match(self.tree.root(namespace), TokenLog(tokens), limit)

    def hold(self, tokens, namespace="a", step=1):
        """Lock what there is of `tokens`, enter the rest; return the node that ends them."""
        tree, log = self.tree, TokenLog(tokens)
        match = tree.match(tree.root(namespace), log, len(tokens))
        node = tree.lock(match)
        rest = log.buffer[match.depth * tree.width : len(log) // tree.block_size * tree.width]
        if rest:
            node = tree.insert(node, rest, self.pool.take(len(rest) // tree.width), step)
        return node

    def remember(self, tokens, namespace="a"):
        """Enter `tokens` and let go; return their blocks from the root down."""
        node = self.hold(tokens, namespace)
        blocks = self.match(tokens, namespace=namespace).blocks
        self.tree.unlock(node)
        return blocks

    def eviction_order(self):
        return [block for node in self.tree.oldest_first() for block in reversed(node.blocks)]


def test_an_empty_tree_matches_nothing():
    forest = Forest()
    match = forest.tree.match(forest.tree.root("a"), TokenLog([1, 2, 3, 4]), 4)
    assert (match.depth, match.blocks, match.partial, match.num_unlocked) == (0, [], None, 0)


@pytest.mark.parametrize(("limit", "depth"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3)])
def test_a_match_stops_at_the_last_whole_block_within_the_limit(limit, depth):
    forest = Forest()
    blocks = forest.remember(range(12))
    match = forest.match(range(12), limit)
    assert (match.depth, match.blocks) == (depth, blocks[:depth])


@pytest.mark.parametrize("limit", range(13))
def test_the_partial_block_reaches_exactly_to_the_limit(limit):
    forest = Forest()
    forest.remember(range(12))
    match = forest.match(range(12), limit)
    assert match.depth * 4 + match.num_partial == limit
    assert (match.partial is None) == (limit % 4 == 0)


def test_a_match_reads_and_changes_nothing():
    forest = Forest()
    forest.remember(range(12))
    forest.remember([0, 1, 2, 3, 9, 9, 9, 9])
    before = [(node, list(node.blocks), node.locks) for node in forest.tree.oldest_first()]
    forest.match([0, 1, 2, 3, 4, 5, 6, 7, 9, 9])
    assert [(node, list(node.blocks), node.locks) for node in forest.tree.oldest_first()] == before


def test_tokens_that_differ_only_in_high_bytes_are_told_apart():
    forest = Forest(block_size=1)
    forest.remember([0, 2**31 - 1, 0])
    assert forest.match([0, 2**31 - 1, 2**30]).depth == 2
    assert forest.match([0, 2**30 - 1]).depth == 1
    assert forest.match([256]).depth == 0


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_every_block_size_finds_its_whole_blocks_again(block_size):
    forest = Forest(block_size=block_size)
    tokens = [7] * (5 * block_size + block_size // 2)
    assert len(forest.remember(tokens)) == 5
    assert forest.match(tokens).depth == 5


def test_a_partial_match_inside_a_run_names_the_block_after_the_whole_ones():
    forest = Forest()
    blocks = forest.remember(range(12))
    match = forest.match([0, 1, 2, 3, 4, 5, 99])
    assert (match.depth, match.partial, match.num_partial) == (1, blocks[1], 2)


def test_a_partial_match_among_siblings_is_the_longest():
    forest = Forest()
    runs = [[1, 1, 1, 1], [1, 2, 1, 1], [1, 2, 3, 1], [1, 2, 4, 1], [2, 2, 3, 4], [1, 2, 3, 2]]
    (wanted,) = forest.remember(runs[2])
    others = [forest.remember(run) for run in (runs[0], runs[1], runs[3], runs[4])]
    match = forest.match([1, 2, 3, 9])
    assert (match.depth, match.partial, match.num_partial) == (0, wanted, 3)
    assert forest.match([2, 2, 9]).partial == others[3][0]
    assert forest.match([3, 2, 9]).partial is None


def test_a_partial_match_counts_tokens_and_not_bytes_of_tokens():
    forest = Forest(block_size=2)
    forest.remember([5, 0x0102])
    (better,) = forest.remember([5, 0x0302])
    match = forest.match([5, 0x0302])
    assert match.blocks == [better]
    assert forest.match([5, 0x0502]).num_partial == 1


def test_namespaces_do_not_see_each_other():
    forest = Forest()
    forest.remember(range(8), "a")
    assert forest.tree.peek("b") is None
    assert forest.tree.match(forest.tree.root("b"), TokenLog(range(8)), 8).partial is None
    forest.remember(range(8), "b")
    assert set(forest.match(range(8), namespace="a").blocks).isdisjoint(forest.match(range(8), namespace="b").blocks)


def test_locking_inside_a_run_splits_it_and_takes_only_the_upper_part_from_the_evictable():
    forest = Forest()
    blocks = forest.remember(range(16))
    match = forest.match(range(8))
    assert match.num_unlocked == 2
    upper = forest.tree.lock(match)
    assert upper.blocks == blocks[:2]
    assert forest.tree.num_evictable == 2
    assert forest.tree.evict(9) == 2
    assert forest.match(range(16)).blocks == blocks[:2]


def test_splitting_a_run_that_others_hold_keeps_their_locks_on_both_parts():
    forest = Forest()
    deep = forest.hold(range(16))
    middle = forest.tree.lock(forest.match([*range(8), 99, 99, 99, 99]))
    assert (middle.locks, deep.locks) == (2, 1)
    assert deep.parent is middle
    forest.tree.unlock(deep)
    assert forest.tree.num_evictable == 2
    forest.tree.unlock(middle)
    assert forest.tree.num_evictable == 4
    assert not forest.tree.peek("a").locks


def test_a_run_split_twice_still_reads_as_one():
    forest = Forest()
    deep = forest.hold(range(24))
    blocks = list(deep.blocks)
    locks = [forest.tree.lock(forest.match(range(length))) for length in (16, 8, 20, 4)]
    assert forest.match(range(24)).blocks == blocks
    for node in (*locks, deep):
        forest.tree.unlock(node)
    assert forest.match(range(24)).blocks == blocks
    assert forest.eviction_order() == blocks[::-1]


def test_the_head_of_a_split_run_that_nobody_locks_is_evicted_right_after_its_tail():
    forest = Forest()
    first, second = forest.remember(range(16)), forest.remember(range(100, 108))
    forest.tree._split(next(forest.tree.oldest_first()), 1)
    assert forest.eviction_order() == [*first[::-1], *second[::-1]]


def test_a_leaf_that_only_its_holder_locks_grows_in_place():
    forest = Forest()
    node = forest.hold(range(4))
    grown = forest.tree.insert(node, TokenLog(range(4, 8)).buffer, forest.pool.take(1), 2)
    assert grown is node
    assert (len(node.blocks), node.end, node.last_step) == (2, 2, 2)


def test_a_leaf_that_two_hold_gets_a_child_and_keeps_its_end():
    forest = Forest()
    node = forest.hold(range(4))
    assert forest.hold(range(4)) is node
    child = forest.tree.insert(node, TokenLog(range(4, 8)).buffer, forest.pool.take(1), 2)
    assert child is not node
    assert (child.locks, node.locks, child.start, node.end) == (1, 2, 1, 1)


def test_a_node_with_children_does_not_grow_in_place_though_one_holds_it():
    forest = Forest()
    forest.remember(range(8))
    node = forest.hold(range(4))
    child = forest.tree.insert(node, TokenLog([9, 9, 9, 9]).buffer, forest.pool.take(1), 2)
    assert child.parent is node
    assert forest.match(range(8)).depth == 2


def test_the_root_never_grows_in_place():
    forest = Forest()
    node = forest.hold(range(4))
    assert node is not forest.tree.peek("a")


@pytest.mark.parametrize("count", range(7))
def test_evicting_n_blocks_drops_exactly_the_last_n_blocks_of_a_run(count):
    forest = Forest()
    blocks = forest.remember(range(24))
    assert forest.tree.evict(count) == count
    assert forest.match(range(24)).blocks == blocks[: 6 - count]
    assert all(forest.pool.hand(block) == FREE for block in blocks[6 - count :])
    assert forest.tree.num_evictable == 6 - count


def test_evicting_one_block_of_a_long_run_drops_its_sixteen_tokens_and_no_others():
    forest = Forest(num_blocks=128, block_size=16)
    tokens = list(range(2048))
    forest.remember(tokens)
    assert forest.tree.evict(1) == 1
    assert forest.match(tokens).depth * 16 == 2048 - 16


def test_eviction_takes_the_least_recently_used_first():
    forest = Forest()
    runs = [forest.remember([lead] * 8) for lead in (1, 2, 3)]
    forest.tree.unlock(forest.hold([1] * 8))
    assert forest.eviction_order() == [*runs[1][::-1], *runs[2][::-1], *runs[0][::-1]]


def test_using_the_head_of_a_run_makes_only_the_head_recent():
    forest = Forest()
    old, other = forest.remember(range(16)), forest.remember([50] * 8)
    forest.tree.unlock(forest.hold(range(8)))
    assert forest.eviction_order() == [*old[:1:-1], *other[::-1], *old[1::-1]]


def test_children_are_evicted_before_their_parent_whatever_the_order_of_use():
    forest = Forest()
    left = forest.remember([0, 0, 0, 0, 1, 1, 1, 1])
    right = forest.remember([0, 0, 0, 0, 2, 2, 2, 2])
    forest.tree.unlock(forest.hold([0, 0, 0, 0]))
    order = forest.eviction_order()
    assert order.index(left[1]) < order.index(right[1]) < order.index(left[0])


def test_eviction_stops_at_what_is_locked():
    forest = Forest()
    held = forest.hold(range(8))
    loose = forest.remember([*range(8), 1, 1, 1, 1])
    assert forest.tree.evict(100) == 1
    assert forest.match(range(8)).blocks == loose[:2] == held.blocks


def test_evicting_from_an_empty_tree_frees_nothing():
    assert Forest().tree.evict(3) == 0


def test_evicted_blocks_come_back_in_the_order_of_their_positions():
    forest = Forest(num_blocks=4)
    blocks = forest.remember(range(16))
    forest.tree.evict(4)
    assert forest.pool.take(4) == blocks


def test_a_namespace_goes_with_its_last_cached_block():
    forest = Forest()
    forest.remember(range(8), "salt")
    forest.tree.evict(1)
    assert forest.tree.namespaces() == ["salt"]
    forest.tree.evict(1)
    assert forest.tree.namespaces() == []


def test_a_namespace_stays_while_it_is_held_though_nothing_is_cached():
    forest = Forest()
    root = forest.tree.root("salt")
    forest.tree.lock(forest.match([1], namespace="salt"))
    forest.tree.forget_if_empty("salt")
    assert forest.tree.peek("salt") is root
    forest.tree.unlock(root)
    assert forest.tree.namespaces() == []


def test_dropping_a_namespace_leaves_what_is_locked():
    forest = Forest()
    forest.remember(range(16))
    forest.hold(range(8))
    forest.remember([7] * 8, "b")
    forest.tree.drop_namespace("a")
    assert forest.match(range(16)).depth == 2
    assert forest.match([7] * 8, namespace="b").depth == 2
    forest.tree.drop_namespace("b")
    forest.tree.drop_namespace("never heard of")
    assert forest.tree.namespaces() == ["a"]


def test_unlocking_what_is_not_locked_is_caught():
    forest = Forest()
    node = forest.hold(range(4))
    forest.tree.unlock(node)
    with pytest.raises(AssertionError, match="unlock without a lock"):
        forest.tree.unlock(node)


def test_a_step_proves_nothing_that_entered_after_it():
    forest = Forest()
    node = forest.hold(range(4), step=5)
    forest.tree.prove(node, 4)
    assert not node.proven
    forest.tree.prove(node, 5)
    assert node.proven


def test_growing_in_place_keeps_what_was_proven_and_only_that():
    forest = Forest()
    node = forest.hold(range(8), step=1)
    forest.tree.prove(node, 1)
    forest.tree.insert(node, TokenLog([8] * 4).buffer, forest.pool.take(1), 2)
    assert (node.num_proven, node.proven) == (2, False)
    upper = forest.tree.lock(forest.match(range(4)))
    assert (upper.num_proven, node.num_proven) == (1, 1)
    forest.tree.prove(node, 1)
    assert node.num_proven == 1
    forest.tree.prove(node, 2)
    assert node.num_proven == 2
