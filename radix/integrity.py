"""Proof that pool, tree and holdings agree. Slow and complete: for tests, audits and idle moments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from .copies import CopyJob
from .holding import Holding
from .host_integrity import host_problems
from .node import Node
from .pool import BlockPool
from .tree import PrefixTree


def problems(pool: BlockPool, tree: PrefixTree, holdings: Sequence[Holding], num_reserved: int) -> list[str]:
    """Everything that is wrong, in words. Empty when every block, lock and table entry is accounted for."""
    nodes = list(tree.nodes())
    in_tree = [block for node in nodes for block in node.blocks]
    private = [block for holding in holdings for block in holding.private_blocks]
    return [
        *pool.problems(private, in_tree),
        *(fault for node in nodes for fault in _node_problems(tree, node)),
        *(fault for node in [*nodes, *tree.roots()] for fault in _children_problems(tree, node)),
        *_lock_problems(tree, nodes, holdings),
        *(host_problems(tree, tree.host, nodes) if tree.host is not None else ()),
        *_ring_problems(tree, nodes),
        *(fault for holding in holdings for fault in _holding_problems(tree, holding)),
        *_promise_problems(pool, tree, holdings, num_reserved),
    ]


def _node_problems(tree: PrefixTree, node: Node) -> list[str]:
    found = []
    size = max(len(node.blocks), len(node.host_blocks))
    if len(node.tokens) != size * tree.width or not size:
        found.append(f"{len(node.tokens)} bytes of tokens for {size} blocks")
    if node.size != size:
        found.append(f"counts {node.size} blocks, has {size}")
    if not 0 <= node.num_proven <= size:
        found.append(f"{node.num_proven} proven blocks of {size}")
    if node.locks and len(node.blocks) < size:
        found.append(f"is locked, and has {len(node.blocks)} of {size} blocks on the device")
    parent = node.parent
    if parent is None or node.start != parent.end:
        found.append("does not start where its parent ends")
    else:
        if node.num_proven and not parent.proven:
            found.append("proven below an unproven parent")
        if node.last_step < parent.last_step:
            found.append(f"last entered in step {node.last_step}, before its parent in {parent.last_step}")
        if node.blocks and len(parent.blocks) < parent.size:
            found.append("on the device below a parent that is not")
        if node.num_ready and parent.num_in:
            found.append("to be read below a parent that is moving in")
        if node.locks > parent.locks:
            found.append(f"{node.locks} locks, its parent {parent.locks}")
    return [f"{_name(node)}: {fault}" for fault in found]


def _children_problems(tree: PrefixTree, node: Node) -> list[str]:
    found = []
    firsts = []
    for key, bucket in node.children.items():
        if not bucket:
            found.append("an empty place for a child")
        for child in bucket:
            first = bytes(child.tokens[: tree.width])
            firsts.append(first)
            if child.parent is not node or tree.key(first) != key:
                found.append("a child that is not its own or not in its place")
    if sorted(firsts) != node.order:
        found.append("the order of its children is not theirs")
    if len(set(firsts)) != len(firsts):
        found.append("two children start with the same block")
    if node.parent is None and not firsts and not node.locks:
        found.append("a namespace kept for nothing")
    return [f"{_name(node)}: {fault}" for fault in found]


def _lock_problems(tree: PrefixTree, nodes: list[Node], holdings: Sequence[Holding]) -> list[str]:
    held: Counter[int] = Counter()
    for holding in holdings:
        node = holding.node
        while node is not None:
            held[id(node)] += 1
            node = node.parent
    for job in tree.host.lanes.jobs() if tree.host is not None else ():
        node = job.anchor
        while node is not None:
            held[id(node)] += 1
            node = node.parent
    return [
        f"{_name(node)}: {node.locks} locks, {held[id(node)]} holders"
        for node in [*nodes, *tree.roots()]
        if node.locks != held[id(node)]
    ]


def _ring_problems(tree: PrefixTree, nodes: list[Node]) -> list[str]:
    found = []
    # One more than there can be: a damaged list may have no end.
    ring = list(islice(tree.oldest_first(), len(nodes) + 1))
    age = {id(node): position for position, node in enumerate(ring)}
    for node in nodes:
        if (node.locks == 0 and bool(node.blocks)) != (id(node) in age):
            found.append(f"{_name(node)}: {node.locks} locks, {'in' if id(node) in age else 'not in'} the eviction list")
        parent = node.parent
        if parent is not None and id(node) in age and id(parent) in age and age[id(parent)] < age[id(node)]:
            found.append(f"{_name(node)}: more recent than its parent")
    if any(newer.older is not older for older, newer in pairwise(ring)):
        found.append("the eviction list reads otherwise backwards")
    strangers = len(set(age) - {id(node) for node in nodes})
    if strangers or len(age) != len(ring):
        found.append(f"the eviction list holds {strangers} nodes that are not in the tree, or one twice")
    evictable = sum(len(node.blocks) for node in nodes if node.locks == 0)
    if evictable != tree.num_evictable:
        found.append(f"{tree.num_evictable} blocks counted evictable, {evictable} are")
    if tree.num_nodes != len(nodes):
        found.append(f"{tree.num_nodes} nodes counted, {len(nodes)} are there")
    return found


def _holding_problems(tree: PrefixTree, holding: Holding) -> list[str]:
    name = f"sequence {holding.seq_id}"
    if holding.node is None:
        holds = bool(holding.block_table or holding.num_tree_blocks or holding.reserved or holding.num_sent)
        return [f"{name}: holds blocks without a place in the tree"] if holds else []
    path: list[int] = []
    node: Node | None = holding.node
    while node is not None:
        path[:0] = node.blocks
        root, node = node, node.parent
    found = []
    if root is not tree.peek(holding.namespace):
        found.append(f"{name}: its path does not end at its namespace's root")
    pending = {id(job) for job in _jobs_on_path(holding.node)}
    if pending != {id(job) for job in holding.jobs}:
        found.append(f"{name}: waits for {len(holding.jobs)} copies, {len(pending)} are on its path")
    if path != holding.block_table[: holding.num_tree_blocks] or len(path) != holding.num_tree_blocks:
        found.append(f"{name}: its table is not its path's blocks")
    if holding.num_sent > len(holding.block_table) or any(index >= holding.num_sent for index in holding.changed):
        found.append(f"{name}: the device knows {holding.num_sent} entries of a table of {len(holding.block_table)}")
    return found


def _jobs_on_path(node: Node | None) -> Iterator[CopyJob]:
    while node is not None:
        if node.job_in is not None:
            yield node.job_in
        node = node.parent


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
