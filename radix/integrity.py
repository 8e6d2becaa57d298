"""Proof that pool, tree and holdings agree. Slow and complete: for tests, audits and idle moments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .holding import Holding
from .pool import BlockPool
from .tree import Node, PrefixTree


def problems(pool: BlockPool, tree: PrefixTree, holdings: Sequence[Holding], num_reserved: int) -> list[str]:
    """Everything that is wrong, in words. Empty when every block, lock and table entry is accounted for."""
    nodes = list(tree.nodes())
    in_tree = [block for node in nodes for block in node.blocks]
    private = [block for holding in holdings for block in holding.private_blocks]
    return [
        *pool.problems(private, in_tree),
        *_tree_problems(tree, nodes),
        *_lock_problems(tree, nodes, holdings),
        *_ring_problems(tree, nodes),
        *(fault for holding in holdings for fault in _holding_problems(tree, holding)),
        *_promise_problems(pool, tree, holdings, num_reserved),
    ]


def _tree_problems(tree: PrefixTree, nodes: list[Node]) -> list[str]:
    found = []
    for node in nodes:
        name = _name(node)
        if len(node.tokens) != len(node.blocks) * tree.width or not node.blocks:
            found.append(f"{name}: {len(node.tokens)} bytes of tokens for {len(node.blocks)} blocks")
        parent = node.parent
        if parent is None or node.start != parent.end:
            found.append(f"{name}: does not start where its parent ends")
        elif node.proven and not parent.proven:
            found.append(f"{name}: proven below an unproven parent")
    for root_or_node in [*nodes, *(tree.root(name) for name in tree.namespaces())]:
        firsts = sorted(bytes(child.tokens[: tree.width]) for bucket in root_or_node.children.values() for child in bucket)
        if firsts != root_or_node.order:
            found.append(f"{_name(root_or_node)}: the order of its children is not theirs")
        if len(set(firsts)) != len(firsts):
            found.append(f"{_name(root_or_node)}: two children start with the same block")
    return found


def _lock_problems(tree: PrefixTree, nodes: list[Node], holdings: Sequence[Holding]) -> list[str]:
    held: Counter[int] = Counter()
    for holding in holdings:
        node = holding.node
        while node is not None:
            held[id(node)] += 1
            node = node.parent
    roots = [tree.root(name) for name in tree.namespaces()]
    return [
        f"{_name(node)}: {node.locks} locks, {held[id(node)]} holders"
        for node in [*nodes, *roots]
        if node.locks != held[id(node)]
    ]


def _ring_problems(tree: PrefixTree, nodes: list[Node]) -> list[str]:
    found = []
    age = {id(node): position for position, node in enumerate(tree.oldest_first())}
    for node in nodes:
        if (node.locks == 0) != (id(node) in age):
            found.append(f"{_name(node)}: {node.locks} locks, {'in' if id(node) in age else 'not in'} the eviction list")
        parent = node.parent
        if parent is not None and id(node) in age and id(parent) in age and age[id(parent)] < age[id(node)]:
            found.append(f"{_name(node)}: more recent than its parent")
    if len(age) > len(nodes):
        found.append(f"{len(age)} nodes in the eviction list, {len(nodes)} in the tree")
    evictable = sum(len(node.blocks) for node in nodes if node.locks == 0)
    if evictable != tree.num_evictable:
        found.append(f"{tree.num_evictable} blocks counted evictable, {evictable} are")
    return found


def _holding_problems(tree: PrefixTree, holding: Holding) -> list[str]:
    name = f"sequence {holding.seq_id}"
    if holding.node is None:
        holds = bool(holding.block_table or holding.num_tree_blocks or holding.reserved)
        return [f"{name}: holds blocks without a place in the tree"] if holds else []
    path: list[int] = []
    node: Node | None = holding.node
    while node is not None:
        path[:0] = node.blocks
        root, node = node, node.parent
    found = []
    if root is not tree.root(holding.namespace):
        found.append(f"{name}: its path does not end at its namespace's root")
    if path != holding.block_table[: holding.num_tree_blocks] or len(path) != holding.num_tree_blocks:
        found.append(f"{name}: its table is not its path's blocks")
    return found


def _promise_problems(pool: BlockPool, tree: PrefixTree, holdings: Sequence[Holding], num_reserved: int) -> list[str]:
    found = []
    promised = sum(holding.reserved for holding in holdings)
    if promised != num_reserved:
        found.append(f"{num_reserved} blocks counted as promised, {promised} are")
    if promised > pool.num_free + tree.num_evictable:
        found.append(f"{promised} blocks promised, {pool.num_free} free and {tree.num_evictable} evictable")
    return found


def _name(node: Node) -> str:
    return f"node at blocks [{node.start}, {node.end})"
