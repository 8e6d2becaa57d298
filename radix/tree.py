"""The prefix tree: which blocks hold the KV of which token prefixes, and what may be evicted.

A radix tree per namespace. An edge (kept in the node it leads to) is a run of whole blocks, its
tokens compared as real tokens, never by digest. A node is *locked* by every sequence that holds
it or something below it; unlocked nodes are cache and may be evicted.

    invariant                                                   kept by
    ---------------------------------------------------------   -------------------------------
    a parent has at least its children's locks                  lock and unlock walk to the root
    unlocked nodes, and only they, are in the eviction list     lock, unlock
    a parent is more recent in that list than its children      unlock appends leaf first
    so the list's head is always a leaf                         the two above
    no two children of a node start with the same block         insert looks before it adds
    proven blocks come first on every path                      prove walks up until all is
    a node's last step is no earlier than its parent's          blocks enter in order of position
    a root has children or locks, else its namespace is gone    unlock, _disown

Eviction takes blocks off the tail of the head's run, so freeing 16 tokens drops 16 tokens and
costs O(1). Alternatives rejected: a heap of leaves by time (O(log n), stale entries), walking the
tree for leaves (O(nodes)), dropping whole leaves (frees 2,048 tokens when 16 are wanted).

*Pending* blocks: they enter the tree when their step is planned, before it has run. That is safe
to share with rows of the same or a later step, since a step writes the KV of all its rows before
any row attends; it is not safe to copy from within the same step (copies run first), and the
pool's `last_step` tells. *Unproven* blocks are computed or about to be, but no row has drawn a
token from finite logits over them yet. If a row's logits turn out not finite, the unproven part of
its path leaves the tree with all that hangs on it. A run counts its proven blocks, since a leaf that
grows in place has proven ones at its head and new ones at its tail.

A run's blocks are on the device here. A host tier adds a second residency per run beside
`Node.blocks`, with a list of its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from ..protocol.ids import BlockId
from .node import Node, Root
from .pool import BlockPool
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


class PrefixTree:
    """Radix trees over token prefixes, one per namespace, over the blocks of one pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.width = block_size * TOKEN_BYTES
        self.num_evictable = 0
        self._roots: dict[Hashable, Root] = {}
        # Sentinel of the ring of unlocked nodes: .newer is the oldest, .older the most recent.
        self._ring = Node(None, bytearray(), [], 0)
        self._ring.older = self._ring.newer = self._ring

    @staticmethod
    def key(first_block: bytes) -> Hashable:
        """Index of a child in its parent. Any function is right: a walk compares tokens within a key."""
        return first_block

    # ---- lookup ---------------------------------------------------------------------------------

    def root(self, namespace: Hashable) -> Node:
        """The root of `namespace`, made if there is none: lock it, or `forget_if_empty`."""
        found = self._roots.get(namespace)
        if found is None:
            found = self._roots[namespace] = Root(namespace)
        return found

    def peek(self, namespace: Hashable) -> Node | None:
        """The root of `namespace` if there is one."""
        return self._roots.get(namespace)

    def match(self, node: Node, log: TokenLog, limit: int) -> Match:
        """Longest prefix of `log`, up to `limit` tokens, that the tree holds below the end of `node`.

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
                taken = len(child.blocks)
                blocks += child.blocks
            else:
                taken = self._equal_blocks(run, buffer, position, stop)
                blocks += child.blocks[:taken]
            if child.locks == 0:
                num_unlocked += taken
            node = child
            position += taken * width
            if taken < len(child.blocks):
                break
        depth = position // width
        wanted = bytes(buffer[position : min(position + width, stop)])
        return Match(node, depth, blocks, num_unlocked, *self._partial(node, depth, wanted))

    def _child(self, node: Node, first: bytes) -> Node | None:
        for child in node.children.get(self.key(first), ()):
            if child.tokens.startswith(first):
                return child
        return None

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

    def _partial(self, node: Node, depth: int, wanted: bytes) -> tuple[BlockId | None, int, bool]:
        """The block after `depth` that shares the most leading tokens with `wanted`, how many, and whether it is proven."""
        best: tuple[BlockId | None, int, bool] = (None, 0, False)
        if len(wanted) < TOKEN_BYTES:
            return best
        if depth < node.end:
            inside = depth - node.start
            run = node.tokens[inside * self.width : (inside + 1) * self.width]
            count = common_tokens(run, wanted)
            return (node.blocks[inside], count, inside < node.num_proven) if count else best
        # The longest common prefix with a sorted list is with one of the two neighbours of its place.
        place = bisect_left(node.order, wanted)
        for first in node.order[max(0, place - 1) : place + 1]:
            count = common_tokens(first, wanted)
            if count > best[1]:
                child = self._child(node, first)
                assert child is not None
                best = (child.blocks[0], count, child.num_proven > 0)
        return best

    # ---- locks ----------------------------------------------------------------------------------

    def lock(self, match: Match, below: Node | None = None) -> Node:
        """Lock the matched path, splitting a run where the match ends inside it; return its last node.

        `below`: the sequence already locks the path to this node, so only what is beneath it is counted.
        """
        node = match.node
        if match.depth < node.end:
            node = self._split(node, match.depth - node.start)
        step: Node | None = node
        while step is not None and step is not below:
            if step.locks == 0 and step.parent is not None:
                self._unlink(step)
                self.num_evictable -= len(step.blocks)
            step.locks += 1
            step = step.parent
        return node

    def unlock(self, node: Node) -> None:
        """Give back a lock on the path to `node`; what nobody locks becomes the most recent cache."""
        step: Node | None = node
        while step is not None:
            step.locks -= 1
            assert step.locks >= 0, "unlock without a lock"
            if step.locks == 0:
                if step.parent is None:
                    self._forget_idle(step)
                else:
                    self._link_newest(step)
                    self.num_evictable += len(step.blocks)
            step = step.parent

    # ---- growth ---------------------------------------------------------------------------------

    def insert(self, node: Node, tokens: bytearray, blocks: list[BlockId], step_id: int) -> Node:
        """Hang a run below the end of `node`, which the caller locks; return the node that now ends with it.

        `blocks` pass from the caller's hand to the tree, locked once, pending in `step_id`; so do both containers,
        which are not copied. The caller has looked: no child starts with the same block. A leaf that only the
        caller holds grows in place.
        """
        self.pool.enter_tree(blocks)
        if node.parent is not None and node.locks == 1 and not node.children:
            node.tokens += tokens
            node.blocks += blocks
            node.last_step = step_id
            return node
        child = Node(node, tokens, blocks, node.end)
        child.locks = 1
        child.last_step = step_id
        self._adopt(node, child)
        return child

    def prove(self, node: Node, step_id: int) -> None:
        """A row drew a token from finite logits over the path to `node` in `step_id`."""
        step: Node | None = node
        while step is not None and not step.proven:
            if step.last_step <= step_id:
                step.num_proven = len(step.blocks)
            step = step.parent

    def first_unproven(self, node: Node) -> Node:
        """Topmost node on the path to `node` that is not all proven, or `node` itself if all is."""
        while node.parent is not None and not node.parent.proven:
            node = node.parent
        return node

    def drop_unproven(self, node: Node) -> None:
        """Take the unproven tail of `node` and all below it out of the tree. Nobody may lock them any more."""
        if node.num_proven:
            self._split(node, node.num_proven)
        self.drop(node)

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Cut `node` after `num_blocks` blocks. The upper part is new and returned; `node` keeps its tail.

        before   parent -> [ 0 .......... n ) node
        after    parent -> [ 0 .. k ) upper -> [ k .. n ) node     locks of both: node's
        """
        parent = node.parent
        assert parent is not None
        cut = num_blocks * self.width
        upper = Node(parent, node.tokens[:cut], node.blocks[:num_blocks], node.start)
        upper.locks, upper.last_step = node.locks, node.last_step
        upper.num_proven = min(node.num_proven, num_blocks)
        node.num_proven -= upper.num_proven
        first = bytes(node.tokens[: self.width])
        bucket = parent.children[self.key(first)]
        bucket[bucket.index(node)] = upper  # same first block: the parent's order stands
        del node.tokens[:cut]
        del node.blocks[:num_blocks]
        node.start += num_blocks
        node.parent = upper
        self._adopt(upper, node)
        if node.locks == 0:
            self._link_after(node, upper)
        return upper

    def _adopt(self, parent: Node, child: Node) -> None:
        first = bytes(child.tokens[: self.width])
        parent.children.setdefault(self.key(first), []).append(child)
        insort(parent.order, first)

    # ---- eviction -------------------------------------------------------------------------------

    def evict(self, count: int) -> int:
        """Free exactly `count` blocks, least recently used first, tails first; return how many there were."""
        freed = 0
        while freed < count and (node := self._ring.newer) is not self._ring:
            assert node is not None and not node.children, "the oldest unlocked node is not a leaf"
            freed += self._trim(node, count - freed)
        return freed

    def drop(self, node: Node) -> None:
        """Take `node` and all below it out of the tree and free their blocks. Nobody may lock them any more."""
        for inner in list(_leaves_first(node)):
            assert inner.locks == 0, "a locked node is dropped"
            self._trim(inner, len(inner.blocks))

    def drop_namespace(self, namespace: Hashable) -> None:
        """Forget everything under `namespace` that is not locked, and the namespace itself once it is empty."""
        root = self._roots.get(namespace)
        if root is None:
            return
        for node in list(_leaves_first(root)):
            if node is not root and node.locks == 0:
                self._trim(node, len(node.blocks))
        self.forget_if_empty(namespace)

    def forget_if_empty(self, namespace: Hashable) -> None:
        """Drop a namespace's root when nothing hangs below it and nobody holds it."""
        root = self._roots.get(namespace)
        if root is not None:
            self._forget_idle(root)

    def clear(self) -> None:
        """Forget every unlocked block."""
        self.evict(self.num_evictable)

    def _trim(self, node: Node, count: int) -> int:
        """Free up to `count` blocks off the tail of an unlocked leaf; unhook it when none is left."""
        count = min(count, len(node.blocks))
        kept = len(node.blocks) - count
        freed = node.blocks[kept:]
        first = bytes(node.tokens[: self.width])
        del node.blocks[kept:]
        del node.tokens[kept * self.width :]
        node.num_proven = min(node.num_proven, kept)
        # Tail first, so that the head of the run is the first to be handed out again: tables stay ascending.
        self.pool.free_from_tree(freed[::-1])
        self.num_evictable -= count
        if not node.blocks:
            self._unlink(node)
            self._disown(node, first)
        return count

    def _disown(self, node: Node, first: bytes) -> None:
        parent = node.parent
        assert parent is not None
        key = self.key(first)
        bucket = parent.children[key]
        bucket.remove(node)
        if not bucket:
            del parent.children[key]
        del parent.order[bisect_left(parent.order, first)]
        node.parent = None
        if parent.parent is None:
            self._forget_idle(parent)

    def _forget_idle(self, root: Node) -> None:
        """Namespaces come with every salt: one that nobody holds and that caches nothing leaves no trace."""
        assert isinstance(root, Root), "only a root is without a parent"
        if root.locks == 0 and not root.children:
            self._roots.pop(root.namespace, None)

    # ---- the ring of unlocked nodes -------------------------------------------------------------

    def _link_newest(self, node: Node) -> None:
        newest = self._ring.older
        assert newest is not None
        self._link_after(newest, node)

    def _link_after(self, older: Node, node: Node) -> None:
        newer = older.newer
        assert newer is not None
        node.older, node.newer = older, newer
        older.newer = newer.older = node

    def _unlink(self, node: Node) -> None:
        older, newer = node.older, node.newer
        assert older is not None and newer is not None
        older.newer, newer.older = newer, older
        node.older = node.newer = None

    # ---- audit ----------------------------------------------------------------------------------

    def namespaces(self) -> list[Hashable]:
        """Namespaces that have a root."""
        return list(self._roots)

    def nodes(self) -> Iterator[Node]:
        """Every node except the roots, parents after their children."""
        for root in list(self._roots.values()):
            for node in _leaves_first(root):
                if node is not root:
                    yield node

    def oldest_first(self) -> Iterator[Node]:
        """The unlocked nodes in eviction order."""
        node = self._ring.newer
        while node is not None and node is not self._ring:
            yield node
            node = node.newer


def _leaves_first(node: Node) -> Iterator[Node]:
    stack = [(node, False)]
    while stack:
        current, seen = stack.pop()
        if seen:
            yield current
            continue
        stack.append((current, True))
        stack.extend((child, False) for bucket in current.children.values() for child in bucket)
