"""What one sequence holds of the KV memory."""

from __future__ import annotations

from collections.abc import Hashable

from ..protocol.ids import BlockId, SequenceId, StepId
from .copies import CopyJob
from .node import Node


class Holding:
    """A sequence's block table, and which part of it is the tree's.

        block_table    [ 0 ........ num_tree_blocks ) [ num_tree_blocks ........ )
        owner          the tree, locked down to `node`   this sequence, privately

    `node` is None while the sequence holds nothing (waiting, preempted, paused).
    `reserved` blocks are promised to it and not yet taken. `num_sent` entries of the table are known
    to the device; `changed` lists those among them that have been switched since. `switched_in` is the
    last step from which on it reads blocks of others that it did not read before. `jobs` are the copies
    that must arrive before anything of it can be computed.
    """

    __slots__ = (
        "block_table",
        "changed",
        "jobs",
        "namespace",
        "node",
        "num_sent",
        "num_tree_blocks",
        "reserved",
        "seq_id",
        "switched_in",
    )

    def __init__(self, seq_id: SequenceId, namespace: Hashable) -> None:
        self.seq_id = seq_id
        self.namespace = namespace
        self.node: Node | None = None
        self.num_tree_blocks = 0
        self.block_table: list[BlockId] = []
        self.reserved = 0
        self.num_sent = 0
        self.changed: list[int] = []
        self.switched_in = StepId(0)
        self.jobs: set[CopyJob] = set()

    @property
    def private_blocks(self) -> list[BlockId]:
        """Blocks that only this sequence holds."""
        return self.block_table[self.num_tree_blocks :]

    def place(self, index: int, block: BlockId) -> BlockId | None:
        """Put `block` at `index` of the table (at most one past its end); return the block it replaces."""
        if index == len(self.block_table):
            self.block_table.append(block)
            return None
        old = self.block_table[index]
        self.block_table[index] = block
        if index < self.num_sent:
            self.changed.append(index)
        return old

    def take_edits(self) -> list[tuple[int, list[BlockId]]]:
        """Runs of the table the device does not know yet, as (first index, block ids), and count them as sent."""
        edits = [(index, [self.block_table[index]]) for index in sorted(set(self.changed))]
        if self.num_sent < len(self.block_table):
            edits.append((self.num_sent, self.block_table[self.num_sent :]))
        self.mark_sent()
        return edits

    def mark_sent(self) -> None:
        """The device has been sent the whole table."""
        self.num_sent = len(self.block_table)
        self.changed.clear()
