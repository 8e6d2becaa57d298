"""The proof is worth something only if it fails: each invariant is broken by hand and must be reported."""

import pytest

from repertory.radix.node import Root
from repertory.radix.pool import FREE, IN_TREE
from repertory.tests.radix.drive import Driver


@pytest.fixture
def drive():
    """Cache in one branch, a sequence with shared and private blocks in another, one that waits."""
    drive = Driver(num_blocks=16)
    drive.remember(range(12))
    drive.remember([*range(4), *[7] * 8])
    drive.serve([*range(4), *[6] * 7])
    drive.open([1, 2, 3])
    drive.start([5] * 9)
    return drive


def nodes(drive):
    return list(drive.cache.tree.nodes())


def holder(drive):
    return next(holding for holding in drive.cache.holdings() if holding.num_tree_blocks)


def unlocked(drive):
    return next(drive.cache.tree.oldest_first())


def a_lock_too_many(drive):
    unlocked(drive).locks += 1


def a_lock_too_few(drive):
    holder(drive).node.locks -= 1


def a_lock_too_many_on_a_root(drive):
    drive.cache.tree.root("shared").locks += 1


def a_block_in_two_hands(drive):
    drive.cache.pool._free.append(holder(drive).block_table[-1])


def a_block_in_two_nodes(drive):
    first, second, *_ = nodes(drive)
    second.blocks[0] = first.blocks[0]


def a_block_that_two_sequences_own(drive):
    waiting = next(holding for holding in drive.cache.holdings() if holding.node is None)
    waiting.block_table = [holder(drive).block_table[-1]]


def a_free_block_twice(drive):
    drive.cache.pool._free.append(drive.cache.pool._free[0])


def a_lost_block(drive):
    drive.cache.pool._free.pop()


def a_hand_that_says_otherwise(drive):
    drive.cache.pool._hand[unlocked(drive).blocks[0]] = FREE


def a_free_block_whose_hand_says_tree(drive):
    drive.cache.pool._hand[drive.cache.pool._free[0]] = IN_TREE


def a_wrong_count_of_the_evictable(drive):
    drive.cache.tree.num_evictable += 1


def a_node_missing_from_the_ring(drive):
    drive.cache.tree.ring.remove(unlocked(drive))


def a_locked_node_in_the_ring(drive):
    drive.cache.tree.ring.add(holder(drive).node)


def a_ring_without_an_end(drive):
    node = unlocked(drive)
    node.newer = node


def a_ring_that_reads_otherwise_backwards(drive):
    first, second = list(drive.cache.tree.oldest_first())[:2]
    second.older = drive.cache.tree.ring.sentinel
    assert second.older is not first


def a_stranger_in_the_ring(drive):
    drive.cache.tree.ring.add(Root("nowhere"))


def tokens_without_a_block(drive):
    unlocked(drive).tokens += bytes(16)


def an_empty_node(drive):
    node = unlocked(drive)
    node.blocks.clear()
    node.tokens.clear()


def a_gap_between_parent_and_child(drive):
    unlocked(drive).start += 1


def an_order_that_is_not_the_childrens(drive):
    next(node for node in nodes(drive) if node.children).order.reverse()


def two_children_with_the_same_first_block(drive):
    parent = next(node for node in nodes(drive) if len(node.order) > 1)
    first, second, *_ = (child for bucket in parent.children.values() for child in bucket)
    second.tokens[:16] = first.tokens[:16]


def a_child_in_the_wrong_place(drive):
    parent = next(node for node in nodes(drive) if len(node.order) > 1)
    first, second, *_ = parent.children
    parent.children[first], parent.children[second] = parent.children[second], parent.children[first]


def a_child_of_another_parent(drive):
    node = holder(drive).node
    node.parent = drive.cache.tree.root("shared")


def a_place_without_a_child(drive):
    drive.cache.tree.root("shared").children["nothing"] = []


def proven_below_unproven(drive):
    next(node for node in nodes(drive) if node.children).num_proven = 0


def more_proven_than_there_is(drive):
    unlocked(drive).num_proven += 1


def a_last_step_before_the_parents(drive):
    unlocked(drive).last_step = 0


def a_namespace_kept_for_nothing(drive):
    drive.cache.tree.root("empty")


def a_wrong_table_entry(drive):
    table = holder(drive).block_table
    table[0], table[1] = table[1], table[0]


def a_wrong_boundary_between_shared_and_private(drive):
    holder(drive).num_tree_blocks -= 1


def a_table_shorter_than_its_path(drive):
    del holder(drive).block_table[1:]


def a_path_in_another_namespace(drive):
    holder(drive).namespace = "another"


def a_place_in_the_tree_given_up_but_not_the_blocks(drive):
    holder(drive).node = None


def entries_sent_that_do_not_exist(drive):
    holder(drive).num_sent = 100


def a_promise_nobody_counted(drive):
    holder(drive).reserved += 1


def a_promise_counted_for_nobody(drive):
    drive.cache.num_reserved += 1


def more_promised_than_there_is(drive):
    holder(drive).reserved += 50
    drive.cache.num_reserved += 50


def a_promise_to_one_who_waits(drive):
    waiting = next(holding for holding in drive.cache.holdings() if holding.node is None)
    waiting.reserved += 1
    drive.cache.num_reserved += 1


DAMAGES = {
    a_lock_too_many: "holders",
    a_lock_too_few: "holders",
    a_lock_too_many_on_a_root: "holders",
    a_block_in_two_hands: "is free and private",
    a_block_in_two_nodes: "is in the tree and in the tree",
    a_block_that_two_sequences_own: "is private and private",
    a_free_block_twice: "is free and free",
    a_lost_block: "in nobody's hand",
    a_hand_that_says_otherwise: "the pool says free",
    a_free_block_whose_hand_says_tree: "the pool says in the tree",
    a_wrong_count_of_the_evictable: "counted evictable",
    a_node_missing_from_the_ring: "not in the eviction list",
    a_locked_node_in_the_ring: "in the eviction list",
    a_ring_without_an_end: "the eviction list",
    a_ring_that_reads_otherwise_backwards: "backwards",
    a_stranger_in_the_ring: "not in the tree",
    tokens_without_a_block: "bytes of tokens",
    an_empty_node: "0 bytes of tokens for 0 blocks",
    a_gap_between_parent_and_child: "does not start where its parent ends",
    an_order_that_is_not_the_childrens: "the order of its children",
    two_children_with_the_same_first_block: "start with the same block",
    a_child_in_the_wrong_place: "not in its place",
    a_child_of_another_parent: "not its own",
    a_place_without_a_child: "an empty place",
    proven_below_unproven: "below an unproven parent",
    more_proven_than_there_is: "proven blocks of",
    a_last_step_before_the_parents: "before its parent",
    a_namespace_kept_for_nothing: "kept for nothing",
    a_wrong_table_entry: "its table is not its path's",
    a_wrong_boundary_between_shared_and_private: "its table is not its path's",
    a_table_shorter_than_its_path: "its table is not its path's",
    a_path_in_another_namespace: "its namespace's root",
    a_place_in_the_tree_given_up_but_not_the_blocks: "without a place in the tree",
    entries_sent_that_do_not_exist: "the device knows 100 entries",
    a_promise_nobody_counted: "counted as promised",
    a_promise_counted_for_nobody: "counted as promised",
    more_promised_than_there_is: "blocks promised",
    a_promise_to_one_who_waits: "without a place in the tree",
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_the_audit_reports(drive, damage, words):
    assert drive.cache.check_integrity() == []
    damage(drive)
    found = drive.cache.check_integrity()
    assert any(words in fault for fault in found), found


def test_the_audit_reports_a_parent_that_would_be_evicted_before_its_child():
    drive = Driver()
    drive.remember(range(8))
    drive.remember([*range(4), *[7] * 4])
    tree = drive.cache.tree
    parent = list(tree.oldest_first())[-1]
    assert parent.children
    tree.ring.remove(parent)
    tree.ring.add_after(tree.ring.sentinel, parent)
    assert drive.cache.check_integrity() == ["node at blocks [1, 2): more recent than its parent"] * 2


def test_the_audit_of_a_damaged_cache_changes_nothing(drive):
    holder(drive).namespace = "another"
    assert drive.cache.check_integrity()
    assert drive.cache.tree.peek("another") is None
