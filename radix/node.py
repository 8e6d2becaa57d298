"""What the prefix tree is made of: runs of whole blocks, and the roots they hang below."""

from __future__ import annotations

from collections.abc import Hashable

from ..protocol.ids import BlockId


class Node:
    """A run of whole blocks below a prefix. `tokens` is the run's tokens, `blocks` their KV."""

    __slots__ = (
        "blocks",
        "children",
        "last_step",
        "locks",
        "newer",
        "num_proven",
        "older",
        "order",
        "parent",
        "start",
        "tokens",
    )

    def __init__(self, parent: Node | None, tokens: bytearray, blocks: list[BlockId], start: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks
        self.start = start  # blocks above this run
        self.children: dict[Hashable, list[Node]] = {}
        self.order: list[bytes] = []  # first blocks of the children, sorted: a partial match is a neighbour
        self.locks = 0
        self.num_proven = 0  # leading blocks over which a token was drawn from finite logits
        self.last_step = 0  # the last step that a block of this run entered in
        self.older: Node | None = None
        self.newer: Node | None = None

    @property
    def end(self) -> int:
        """Blocks from the root to the end of this run."""
        return self.start + len(self.blocks)

    @property
    def proven(self) -> bool:
        """Whether all of the run is proven (a root, which has no blocks, always is)."""
        return self.num_proven == len(self.blocks)


class Root(Node):
    """Where a namespace's tree begins: no blocks, and nothing above it."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(None, bytearray(), [], 0)
        self.namespace = namespace
