"""Lookups in the prefix tree: what of a token log is there, on which tier. Nothing here changes anything.

An edge's tokens are compared as real tokens, a run at a time: one `bytearray.startswith`, a memcmp without a copy. Where
a run differs, its equal blocks are found by bisection. Within the block that differs the longest common prefix with any
child is with one of the two neighbours of its place among the children's first blocks, which are kept sorted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from typing import NamedTuple

from ..protocol.ids import BlockId
from .copies import CopyJob
from .node import Node
from .tokens import TOKEN_BYTES, TokenLog, common_tokens


class Match(NamedTuple):
    """Result of a lookup. It changes nothing and is valid until the tree changes."""

    node: Node
    """Deepest node reached."""
    depth: int
    """Blocks from the root to the end of the match, which may lie inside `node`'s run."""
    blocks: list[BlockId]
    """Matched blocks after the lookup's start."""
    num_unlocked: int
    """How many of them are unlocked: locking the match takes that many away from the evictable."""
    partial: BlockId | None
    """A block whose first `num_partial` tokens are the next ones: a source for copy-on-write."""
    num_partial: int
    is_partial_proven: bool
    """Whether that block is proven. A copy of it leaves no trace in the tree, so an unproven one must not spread."""
    partial_node: Node | None
    """The run that block is in."""


class Beyond(NamedTuple):
    """How a match goes on over blocks that cannot be read yet. It changes nothing either."""

    node: Node
    depth: int
    jobs: list[CopyJob]
    """Copies that bring the first `num_moving` of them in."""
    num_moving: int
    num_host: int
    """The rest: blocks that are only on the host."""


class Lookup:
    """The reading half of `PrefixTree`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.width = block_size * TOKEN_BYTES

    @staticmethod
    def key(first_block: bytes) -> Hashable:
        """Index of a child in its parent. Any function is right: a walk compares tokens within a key."""
        return first_block

    def match(self, node: Node, log: TokenLog, limit: int) -> Match:
        """Longest prefix of `log`, up to `limit` tokens, whose KV is on the device, below the end of `node`.

        `log` must agree with the tree down to the end of `node`. Read-only: splits and touches nothing.
        """
        buffer, width = log.buffer, self.width
        position = node.end * width
        stop = limit * TOKEN_BYTES
        blocks: list[BlockId] = []
        num_unlocked = 0
        while stop - position >= width:
            first = bytes(buffer[position : position + width])
            child = self._child(node, first)
            if child is None:
                break
            run = child.tokens
            if len(run) <= stop - position and buffer.startswith(run, position):
                taken = child.size
            else:
                taken = self._equal_blocks(run, buffer, position, stop)
            taken = min(taken, len(child.blocks) - child.num_in)
            if taken == 0:
                break
            blocks += child.blocks if taken == len(child.blocks) else child.blocks[:taken]
            if child.locks == 0:
                num_unlocked += taken
            node = child
            position += taken * width
            if taken < child.size:
                break
        depth = position // width
        wanted = bytes(buffer[position : min(position + width, stop)])
        return Match(node, depth, blocks, num_unlocked, *self._partial(node, depth, wanted))

    def beyond(self, match: Match, log: TokenLog, limit: int) -> Beyond | None:
        """How `match` goes on over blocks that are moving in or on the host, up to `limit` tokens; None: it does not."""
        node, depth = match.node, match.depth
        jobs: list[CopyJob] = []
        num_moving = num_host = 0
        while True:
            if depth == node.end:
                child = self.child_at(node, log, limit)
                if child is None:
                    break
                node = child
            # From the start of the run: what lies before `depth` is known to be equal.
            common = self.num_equal(node, log, limit)
            reach = min(common, max(len(node.blocks), node.num_saved))
            moving = min(reach, len(node.blocks)) - (depth - node.start)
            if moving > 0 and node.job_in is not None:
                jobs.append(node.job_in)
                num_moving += moving
                depth += moving
            host = reach - (depth - node.start)
            num_host += max(0, host)
            depth += max(0, host)
            if depth < node.end:
                break
        if depth == match.depth:
            return None
        while node.start >= depth and node.parent is not None:
            node = node.parent
        return Beyond(node, depth, jobs, num_moving, num_host)

    def deepest(self, node: Node, log: TokenLog, limit: int | None = None) -> tuple[Node, int]:
        """The last node on the path that `log` (its first `limit` tokens) names below `node`, and the path's length in
        blocks, on whichever tier.
        """
        limit = len(log) if limit is None else limit
        depth = node.end
        while (child := self.child_at(node, log, limit)) is not None:
            common = self.num_equal(child, log, limit)
            node, depth = child, child.start + common
            if common < child.size:
                break
        return node, depth

    def child_at(self, node: Node, log: TokenLog, limit: int) -> Node | None:
        """The child of `node` that starts with the next whole block of `log`, if that ends within `limit` tokens."""
        start = node.end * self.width
        if (limit * TOKEN_BYTES) - start < self.width:
            return None
        return self._child(node, bytes(log.buffer[start : start + self.width]))

    def _child(self, node: Node, first: bytes) -> Node | None:
        for child in node.children.get(self.key(first), ()):
            if child.tokens.startswith(first):
                return child
        return None

    def num_equal(self, child: Node, log: TokenLog, limit: int) -> int:
        """How many leading blocks of `child` are those of `log` in their place, up to `limit` tokens; the first is."""
        return self._equal_blocks(child.tokens, log.buffer, child.start * self.width, limit * TOKEN_BYTES)

    def num_common(self, left: TokenLog, right: TokenLog, limit: int) -> int:
        """How many leading blocks two logs share within `limit` tokens; they share the first."""
        return self._equal_blocks(left.buffer, right.buffer, 0, limit * TOKEN_BYTES)

    def _equal_blocks(self, run: bytearray, buffer: bytearray, position: int, stop: int) -> int:
        """How many leading blocks of `run` stand at `position` of `buffer` before `stop`; the first does."""
        width = self.width
        low, high = 1, min(len(run), stop - position) // width
        while low < high:
            middle = (low + high + 1) // 2
            if buffer.startswith(run[low * width : middle * width], position + low * width):
                low = middle
            else:
                high = middle - 1
        return low

    def _partial(self, node: Node, depth: int, wanted: bytes) -> tuple[BlockId | None, int, bool, Node | None]:
        """The block after `depth` that shares the most leading tokens with `wanted`: it, how many, is it proven, its node."""
        best: tuple[BlockId | None, int, bool, Node | None] = (None, 0, False, None)
        if len(wanted) < TOKEN_BYTES:
            return best
        if depth < node.end:
            inside = depth - node.start
            if inside >= node.num_ready:
                return best
            run = node.tokens[inside * self.width : (inside + 1) * self.width]
            count = common_tokens(run, wanted)
            return (node.blocks[inside], count, inside < node.num_proven, node) if count else best
        place = bisect_left(node.order, wanted)
        for first in node.order[max(0, place - 1) : place + 1]:
            count = common_tokens(first, wanted)
            if count > best[1]:
                child = self._child(node, first)
                assert child is not None
                if child.num_ready == 0:
                    continue
                best = (child.blocks[0], count, child.num_proven > 0, child)
        return best
