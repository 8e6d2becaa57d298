"""An intrusive list of nodes, the least recently used first. Every operation is O(1)."""

from __future__ import annotations

from collections.abc import Iterator

from .node import Node


class Ring:
    """Unlocked nodes with blocks on the device. The sentinel's `newer` is the oldest, its `older` the most recent."""

    def __init__(self) -> None:
        self.sentinel = Node(None, bytearray(), [], 0)
        self.sentinel.older = self.sentinel.newer = self.sentinel

    def oldest(self) -> Node | None:
        """The node that was used least recently; None: there is none."""
        node = self.sentinel.newer
        return None if node is self.sentinel else node

    def add(self, node: Node) -> None:
        """Put `node` in as the most recent."""
        newest = self.sentinel.older
        assert newest is not None
        self.add_after(newest, node)

    def add_after(self, older: Node, node: Node) -> None:
        """Put `node` in as the next more recent after `older`."""
        newer = older.newer
        assert newer is not None
        node.older, node.newer = older, newer
        older.newer = newer.older = node

    def remove(self, node: Node) -> None:
        """Take `node` out."""
        older, newer = node.older, node.newer
        assert older is not None and newer is not None
        older.newer, newer.older = newer, older
        node.older = node.newer = None

    def __iter__(self) -> Iterator[Node]:
        """The nodes in eviction order. The list must not change meanwhile."""
        node = self.sentinel.newer
        while node is not None and node is not self.sentinel:
            yield node
            node = node.newer
