"""The blocks of one tier: which are free, who owns the others, and which operations may still touch them.

A block id is in exactly one of three hands: free, private to one sequence, or in the tree.
Every move between hands goes through this class and is checked against the state it leaves, so
a double free or a block in two hands is caught where it happens. No torch, no memory: only ids.

A block may be handed on while operations that use it still run. For that each block remembers the
last operation on each timeline that touches it:

    last_step[block]   a step that reads or writes it (kept while it is in use: the last that writes)
    last_out[block]    a copy from the device to the host
    last_in[block]     a copy from the host to the device

Whoever is handed the block next waits for these on the device side (`Fences`). Steps wait for no
steps, since they run one after the other, so a block is *fenced* only by copies that have not ended.
Unfenced blocks are handed out first, then fenced ones in the order in which they were given back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ..protocol.ids import BlockId, CopyId, StepId
from ..protocol.messages import CopyDirection, Fences

FREE, PRIVATE, IN_TREE = 0, 1, 2
_HANDS = ("free", "private", "in the tree")


def latest(left: Fences, right: Fences) -> Fences:
    """Both fences in one."""
    return Fences(max(left.step, right.step), max(left.copy_out, right.copy_out), max(left.copy_in, right.copy_in))


class BlockPool:
    """`num_blocks` block ids, the hand each is in, and its last operations."""

    __slots__ = (
        "_fenced",
        "_free",
        "_hand",
        "_num_copies",
        "done",
        "last_in",
        "last_out",
        "last_step",
        "num_blocks",
        "used_in",
    )

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free: list[BlockId] = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._fenced: deque[BlockId] = deque()
        self._hand = bytearray(num_blocks)
        self._num_copies = 0  # sent and not ended
        self.last_step = [0] * num_blocks
        self.last_out = [0] * num_blocks
        self.last_in = [0] * num_blocks
        self.used_in = StepId(0)
        """The last step that was sent: what is given back now may have been used in it."""
        self.done = Fences()
        """Copies that have ended, by lane."""

    @property
    def num_free(self) -> int:
        """Blocks in nobody's hand."""
        return len(self._free) + len(self._fenced)

    # ---- hands ----------------------------------------------------------------------------------

    def take(self, count: int, *, oldest: bool = False) -> list[BlockId]:
        """Move `count` free blocks into a sequence's hand. The caller has made sure there are that many.

        The blocks given back last come first, which keeps tables ascending and caches warm; with `oldest` those
        that have been free for longest: a copy into them need not wait for the steps in flight.
        """
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        if count == 0:
            return []
        free, plain = self._free, min(count, len(self._free))
        if oldest:
            taken = free[:plain]
            del free[:plain]
        else:
            taken = free[len(free) - plain :][::-1]
            del free[len(free) - plain :]
        taken += [self._fenced.popleft() for _ in range(count - plain)]
        for block in taken:
            self._hand[block] = PRIVATE
        return taken

    def enter_tree(self, blocks: Iterable[BlockId]) -> None:
        """Private blocks become the tree's."""
        self._move(blocks, PRIVATE, IN_TREE)

    def free_private(self, blocks: Sequence[BlockId]) -> None:
        """A sequence gives blocks back, used until now. The first of `blocks` is handed out last."""
        self._move(blocks, PRIVATE, FREE)
        self._give_back(blocks, self.used_in)

    def free_from_tree(self, blocks: Sequence[BlockId], used_in: int = 0) -> None:
        """The tree gives blocks back that no step after `used_in` has used, except to write them."""
        self._move(blocks, IN_TREE, FREE)
        self._give_back(blocks, used_in)

    def hand(self, block: BlockId) -> int:
        """`FREE`, `PRIVATE` or `IN_TREE`."""
        return self._hand[block]

    # ---- fences ---------------------------------------------------------------------------------

    @property
    def has_copies(self) -> bool:
        """Whether any copy has been sent and not ended."""
        return self._num_copies > 0

    def fences(self, blocks: Iterable[BlockId]) -> Fences:
        """What must be complete before `blocks` are touched by another operation."""
        step = out = into = 0
        for block in blocks:
            step = max(step, self.last_step[block])
            out = max(out, self.last_out[block])
            into = max(into, self.last_in[block])
        return Fences(StepId(step), CopyId(out), CopyId(into))

    def on_copy_sent(self, blocks: Iterable[BlockId], direction: CopyDirection, copy_id: CopyId) -> None:
        """A copy touches these blocks until it has ended."""
        last = self.last_out if direction == "out" else self.last_in
        for block in blocks:
            last[block] = copy_id
        self._num_copies += 1

    def on_copy_done(self, done: Fences) -> None:
        """One more copy has ended; all up to `done` have. What waited for them is as free as any other block."""
        self._num_copies -= 1
        self.done = done
        ready = []
        while self._fenced and not self._is_fenced(self._fenced[0]):
            ready.append(self._fenced.popleft())
        self._free[:0] = ready

    def _is_fenced(self, block: BlockId) -> bool:
        return self.last_out[block] > self.done.copy_out or self.last_in[block] > self.done.copy_in

    def _give_back(self, blocks: Sequence[BlockId], used_in: int) -> None:
        last_step = self.last_step
        for block in blocks:
            if last_step[block] < used_in:
                last_step[block] = used_in
        if not self._num_copies:
            self._free.extend(blocks)
            return
        for block in blocks:
            if self._is_fenced(block):
                self._fenced.append(block)
            else:
                self._free.append(block)

    # ---- audit ----------------------------------------------------------------------------------

    def problems(self, private: Sequence[BlockId], in_tree: Sequence[BlockId]) -> list[str]:
        """What is wrong, given every block that sequences and the tree say they own. Empty: nothing."""
        found = []
        claimed: dict[int, str] = {}
        for hand, blocks in (("free", [*self._free, *self._fenced]), ("private", private), ("in the tree", in_tree)):
            for block in blocks:
                if block in claimed:
                    found.append(f"block {block} is {claimed[block]} and {hand}")
                claimed[block] = hand
                if _HANDS[self._hand[block]] != hand:
                    found.append(f"block {block} is {hand}, the pool says {_HANDS[self._hand[block]]}")
        found += [f"block {block} is free and a copy still uses it" for block in self._free if self._is_fenced(block)]
        if len(claimed) != self.num_blocks:
            lost = sorted(set(range(self.num_blocks)) - set(claimed))
            found.append(f"blocks in nobody's hand: {lost[:8]}{'...' if len(lost) > 8 else ''}")
        return found

    def _move(self, blocks: Iterable[BlockId], source: int, target: int) -> None:
        hand = self._hand
        for block in blocks:
            assert hand[block] == source, f"block {block} is {_HANDS[hand[block]]}, not {_HANDS[source]}"
            hand[block] = target
