"""Proof that the host tier agrees with the tree: blocks, copies under way, pins and what may be evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .copies import CopyJob
from .host import HostTier
from .node import Node
from .tree import PrefixTree


def host_problems(tree: PrefixTree, host: HostTier, nodes: Sequence[Node]) -> list[str]:
    """Everything that is wrong, in words."""
    in_tree = [block for node in nodes for block in node.host_blocks]
    return [
        *(f"host: {fault}" for fault in host.pool.problems([], in_tree)),
        *(fault for node in nodes for fault in _node_problems(node)),
        *_job_problems(host.lanes.jobs(), nodes),
        *_pin_problems(host, nodes),
        *_idle_problems(host, nodes),
        *(f"{tree_part}: not in the tree any more" for tree_part in _strangers(host, nodes)),
    ]


def _node_problems(node: Node) -> list[str]:
    found = []
    if not 0 <= node.num_in <= len(node.blocks) or (node.num_in > 0) != (node.job_in is not None):
        found.append(f"{node.num_in} of {len(node.blocks)} device blocks moving in, {'a' if node.job_in else 'no'} copy")
    if not 0 <= node.num_out <= len(node.host_blocks) or (node.num_out > 0) != (node.job_out is not None):
        found.append(f"{node.num_out} of {len(node.host_blocks)} host blocks moving out, {'a' if node.job_out else 'no'} copy")
    if node.num_in and node.num_saved < len(node.blocks):
        found.append("what is moving in is not on the host")
    if node.num_in and not node.locks:
        found.append("moving in, and nobody locks it")
    return [f"node at blocks [{node.start}, {node.end}): {fault}" for fault in found]


def _job_problems(jobs: Sequence[CopyJob], nodes: Sequence[Node]) -> list[str]:
    found = []
    for job in jobs:
        concerned = {node for node in nodes if (node.job_in if job.direction == "in" else node.job_out) is job}
        if concerned != set(job.nodes):
            found.append(f"copy {job.direction} {job.copy_id}: lists {len(job.nodes)} nodes, {len(concerned)} name it")
        if job.direction == "in" and (job.anchor is None) != (not job.nodes):
            found.append(f"copy in {job.copy_id}: {len(job.nodes)} nodes, {'no' if job.anchor is None else 'an'} anchor")
    known = set(jobs)
    named = {job for node in nodes for job in (node.job_in, node.job_out) if job is not None}
    if not named <= known:
        found.append(f"{len(named - known)} copies named that are not in flight")
    return found


def _pin_problems(host: HostTier, nodes: Sequence[Node]) -> list[str]:
    pins: Counter[int] = Counter()
    for end in host.pinned().values():
        node: Node | None = end
        while node is not None:
            pins[id(node)] += 1
            node = node.parent
    return [
        f"node at blocks [{node.start}, {node.end}): {node.pins} pins, {pins[id(node)]} pinned paths"
        for node in nodes
        if node.pins != pins[id(node)]
    ]


def _idle_problems(host: HostTier, nodes: Sequence[Node]) -> list[str]:
    found = []
    idle = host.idle()
    for node in nodes:
        is_free = not (node.pins or node.job_in or node.job_out)
        if idle.get(node, 0) != (len(node.host_blocks) if is_free else 0):
            found.append(f"node at blocks [{node.start}, {node.end}): {idle.get(node, 0)} host blocks counted as evictable")
    if sum(idle.values()) != host.num_evictable:
        found.append(f"{host.num_evictable} host blocks counted as evictable, {sum(idle.values())} are listed")
    return found


def _strangers(host: HostTier, nodes: Sequence[Node]) -> list[str]:
    known = set(nodes)
    return [f"a node of {len(node.host_blocks)} evictable host blocks" for node in host.idle() if node not in known]
