"""What a prefix tree tells of itself: which paths have become longer, shorter, or belong to other nodes."""

from __future__ import annotations

from typing import Protocol

from .node import Node


class TreeWatcher(Protocol):
    """Told of every change of what `Lookup.deepest` would find, when it has been made. It must not change the tree."""

    def on_grown(self, node: Node, depth: int, first: bytes) -> None:
        """Below `depth` blocks, in `node` or at its end, the path goes on now, with the block of the tokens `first`."""
        ...

    def on_split(self, upper: Node, node: Node) -> None:
        """The head of `node` is `upper` now, which is its parent."""
        ...

    def on_shrunk(self, node: Node) -> None:
        """`node` ends sooner than it did, and nothing hangs below it."""
        ...

    def on_disowned(self, node: Node) -> None:
        """`node`, which hung below the end of another, is in no tree any more."""
        ...
