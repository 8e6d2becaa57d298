"""Which decode rows of a step share which leading blocks, so that a device may read those once for all.

Decode attention is bound by reading KV. Where n rows share a prefix, reading it once saves n - 1
readings (Hydragen, 2402.05099; ChunkAttention, 2402.15220). The tree knows: rows below a node share
everything above its end. Each row is in one group at most; the groups are chosen to save the most:

    best(node) = max((rows below - 1) * blocks above its end, sum of best(child) over its children)

Running rows lock their prefixes, so as long as the same rows decode the groups stay right, and are
not looked for again.
"""

from __future__ import annotations

from typing import NamedTuple

from ...protocol.ids import SequenceId
from ...radix.node import Node
from .sequence import Sequence

LEAST_SAVED_TOKENS = 512
"""Groups that save the reading of fewer tokens are left out."""

Group = tuple[list[int], int]
"""Row indices, and the number of leading blocks they share."""


class _Choice(NamedTuple):
    saved_blocks: int
    groups: list[Group]


class SharedGroups:
    """Groups of the last set of decode rows, kept until another set decodes."""

    def __init__(self, block_size: int) -> None:
        self._least_blocks = -(-LEAST_SAVED_TOKENS // block_size)
        self._seq_ids: list[SequenceId] = []
        self._groups: list[Group] = []

    def of(self, decodes: list[Sequence]) -> list[Group]:
        """Groups among these rows, by their position in the list."""
        seq_ids = [seq.seq_id for seq in decodes]
        if seq_ids != self._seq_ids:
            self._seq_ids = seq_ids
            self._groups = [] if len(decodes) < 2 else self._find(decodes)
        return self._groups

    def _find(self, decodes: list[Sequence]) -> list[Group]:
        rows: dict[Node, list[int]] = {}
        children: dict[Node | None, list[Node]] = {}
        for row, seq in enumerate(decodes):
            node = seq.holding.node
            while node is not None:
                below = rows.get(node)
                if below is None:
                    rows[node] = [row]
                    children.setdefault(node.parent, []).append(node)
                else:
                    below.append(row)
                node = node.parent
        found: list[Group] = []
        for root in children.get(None, []):
            if len(rows[root]) > 1:
                found += self._best(root, rows, children).groups
        return found

    def _best(self, node: Node, rows: dict[Node, list[int]], children: dict[Node | None, list[Node]]) -> _Choice:
        """Of a node that two rows share at least."""
        here = rows[node]
        below = [self._best(child, rows, children) for child in children.get(node, []) if len(rows[child]) > 1]
        saved_below = sum(choice.saved_blocks for choice in below)
        saved_here = (len(here) - 1) * node.end
        if saved_here > saved_below and saved_here >= self._least_blocks:
            return _Choice(saved_here, [(here, node.end)])
        return _Choice(saved_below, [group for choice in below for group in choice.groups])
