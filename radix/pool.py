"""The blocks of one tier: which are free, and who owns the others.

A block id is in exactly one of three hands: free, private to one sequence, or in the tree.
Every move between hands goes through this class and is checked against the state it leaves, so
a double free or a block in two hands is caught where it happens. No torch, no memory: only ids.

`last_step[block]` is the last step that writes the block. It orders a copy from a block against
the step that fills it, and is the place where a tier with copies keeps its fences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..protocol.ids import BlockId

FREE, PRIVATE, IN_TREE = 0, 1, 2
_HANDS = ("free", "private", "in the tree")


class BlockPool:
    """`num_blocks` block ids and the hand each is in."""

    __slots__ = ("_free", "_hand", "last_step", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free: list[BlockId] = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._hand = bytearray(num_blocks)
        self.last_step = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks in nobody's hand."""
        return len(self._free)

    def take(self, count: int) -> list[BlockId]:
        """Move `count` free blocks into a sequence's hand. The caller has made sure there are that many."""
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for block in taken:
            self._hand[block] = PRIVATE
        return taken

    def enter_tree(self, blocks: Iterable[BlockId]) -> None:
        """Private blocks become the tree's."""
        self._move(blocks, PRIVATE, IN_TREE)

    def free_private(self, blocks: Sequence[BlockId]) -> None:
        """A sequence gives blocks back. The first of `blocks` is handed out last."""
        self._move(blocks, PRIVATE, FREE)
        self._free.extend(blocks)

    def free_from_tree(self, blocks: Sequence[BlockId]) -> None:
        """The tree gives blocks back."""
        self._move(blocks, IN_TREE, FREE)
        self._free.extend(blocks)

    def hand(self, block: BlockId) -> int:
        """`FREE`, `PRIVATE` or `IN_TREE`."""
        return self._hand[block]

    def problems(self, private: Sequence[BlockId], in_tree: Sequence[BlockId]) -> list[str]:
        """What is wrong, given every block that sequences and the tree say they own. Empty: nothing."""
        found = []
        claimed: dict[int, str] = {}
        for hand, blocks in (("free", self._free), ("private", private), ("in the tree", in_tree)):
            for block in blocks:
                if block in claimed:
                    found.append(f"block {block} is {claimed[block]} and {hand}")
                claimed[block] = hand
                if _HANDS[self._hand[block]] != hand:
                    found.append(f"block {block} is {hand}, the pool says {_HANDS[self._hand[block]]}")
        if len(claimed) != self.num_blocks:
            lost = sorted(set(range(self.num_blocks)) - set(claimed))
            found.append(f"blocks in nobody's hand: {lost[:8]}{'...' if len(lost) > 8 else ''}")
        return found

    def _move(self, blocks: Iterable[BlockId], source: int, target: int) -> None:
        hand = self._hand
        for block in blocks:
            assert hand[block] == source, f"block {block} is {_HANDS[hand[block]]}, not {_HANDS[source]}"
            hand[block] = target
