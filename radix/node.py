"""What the prefix tree is made of: runs of whole blocks, where their KV is, and the roots they hang below.

    tokens        [ 0 ................................................ size )
    device        [ 0 ........ num_ready ) [ moving in: job_in )               blocks
    host          [ 0 ............... num_saved ) [ moving out: job_out )      host_blocks

A run's device blocks are a prefix of it, and so are its host blocks, because copies and computation go head
first and eviction tail first; the longer of the two is the run. What is moving in is on both tiers and read from
neither but by the copy; what is moving out may have left the device already.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from ..protocol.ids import BlockId, StepId

if TYPE_CHECKING:
    from .copies import CopyJob


class Node:
    """A run of whole blocks below a prefix: its tokens, and their KV on the device and on the host."""

    __slots__ = (
        "blocks",
        "children",
        "host_blocks",
        "job_in",
        "job_out",
        "last_step",
        "locks",
        "newer",
        "num_in",
        "num_out",
        "num_proven",
        "older",
        "order",
        "parent",
        "pins",
        "size",
        "start",
        "tokens",
        "used_in",
    )

    def __init__(self, parent: Node | None, tokens: bytearray, blocks: list[BlockId], start: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.size = len(blocks)  # blocks in the run, on whichever tier
        self.blocks = blocks
        self.num_in = 0  # trailing ones of `blocks` that are moving in
        self.job_in: CopyJob | None = None
        self.host_blocks: list[BlockId] = []
        self.num_out = 0  # trailing ones of `host_blocks` that are moving out
        self.job_out: CopyJob | None = None
        self.start = start  # blocks above this run
        self.children: dict[Hashable, list[Node]] = {}
        self.order: list[bytes] = []  # first blocks of the children, sorted: a partial match is a neighbour
        self.locks = 0  # holders of this node or of something below it: its device blocks stay
        self.pins = 0  # preempted sequences that want it back: its host blocks stay
        self.num_proven = 0  # leading blocks over which a token was drawn from finite logits
        self.last_step = 0  # the last step that a block of this run entered in
        self.used_in = StepId(0)  # no step after this one has read it, unless it is locked
        self.older: Node | None = None
        self.newer: Node | None = None

    @property
    def end(self) -> int:
        """Blocks from the root to the end of this run."""
        return self.start + self.size

    @property
    def proven(self) -> bool:
        """Whether all of the run is proven (a root, which has no blocks, always is)."""
        return self.num_proven == self.size

    @property
    def num_ready(self) -> int:
        """Leading blocks whose KV is on the device."""
        return len(self.blocks) - self.num_in

    @property
    def num_saved(self) -> int:
        """Leading blocks whose KV is on the host."""
        return len(self.host_blocks) - self.num_out

    @property
    def is_on_device(self) -> bool:
        """Whether the whole run is."""
        return len(self.blocks) == self.size and not self.num_in


class Root(Node):
    """Where a namespace's tree begins: no blocks, and nothing above it."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(None, bytearray(), [], 0)
        self.namespace = namespace
