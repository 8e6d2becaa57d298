"""The prefix tree: which blocks hold the KV of which token prefixes, and what may be evicted.

A radix tree per namespace. An edge (kept in the node it leads to) is a run of whole blocks, its
tokens compared as real tokens, never by digest (`lookup.py`). A node is *locked* by every sequence that holds
it or something below it; unlocked nodes are cache and may be evicted.

    invariant                                                   kept by
    ---------------------------------------------------------   -------------------------------
    a parent has at least its children's locks                  lock and unlock walk to the root
    unlocked nodes on the device, and only they, are in the     lock, unlock, _free_tail
    eviction list
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

Two tiers. A run may also be on the host, or on both, or on its way (`node.py`); along a path what is on the
device comes before what is only on the host. With a `HostTier` (`host.py`) evicting a block that has a copy there
keeps the run; evicting one that has none takes the run's tail with all that hangs on it, unless it can be copied
out first. A lookup (`match`) gives what can be read now; `beyond` says how it goes on.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from ..protocol.ids import BlockId
from .lookup import Lookup, Match
from .node import Node, Root
from .pool import BlockPool
from .ring import Ring
from .watching import TreeWatcher

if TYPE_CHECKING:
    from .host import HostTier


class PrefixTree(Lookup):
    """Radix trees over token prefixes, one per namespace, over the blocks of one pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        super().__init__(block_size)
        self.pool = pool
        self.num_evictable = 0
        self.num_evicted = 0  # device blocks taken from the cache so far
        self.num_nodes = 0  # without the roots
        self.ring = Ring()
        self.host: HostTier | None = None
        self.watcher: TreeWatcher | None = None
        self._roots: dict[Hashable, Root] = {}

    # ---- namespaces -----------------------------------------------------------------------------

    def root(self, namespace: Hashable) -> Node:
        """The root of `namespace`, made if there is none: lock it, or `forget_if_empty`."""
        found = self._roots.get(namespace)
        if found is None:
            found = self._roots[namespace] = Root(namespace)
        return found

    def peek(self, namespace: Hashable) -> Node | None:
        """The root of `namespace` if there is one."""
        return self._roots.get(namespace)

    # ---- locks ----------------------------------------------------------------------------------

    def lock(self, match: Match, below: Node | None = None) -> Node:
        """Lock the matched path, splitting a run where the match ends inside it; return its last node.

        `below`: the sequence already locks the path to this node, so only what is beneath it is counted.
        """
        node = self.split(match.node, match.depth)
        self.lock_path(node, below)
        return node

    def lock_path(self, node: Node, below: Node | None = None) -> None:
        """Lock the path to the end of `node`, from `below` on if that is locked already."""
        step: Node | None = node
        while step is not None and step is not below:
            if step.locks == 0 and step.blocks:
                self.ring.remove(step)
                self.num_evictable -= len(step.blocks)
            step.locks += 1
            step = step.parent

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
                    self._becomes_cache(step)
            step = step.parent

    def _becomes_cache(self, node: Node) -> None:
        node.used_in = max(node.used_in, self.pool.used_in)
        if node.blocks:
            self.ring.add(node)
            self.num_evictable += len(node.blocks)
        if node.host_blocks and self.host is not None:
            self.host.touch(node)

    # ---- growth ---------------------------------------------------------------------------------

    def insert(self, node: Node, tokens: bytearray, blocks: list[BlockId], step_id: int) -> Node:
        """Hang a run below the end of `node`, which the caller locks; return the node that now ends with it.

        `blocks` pass from the caller's hand to the tree, locked once, pending in `step_id`; so do both containers,
        which are not copied. The caller has looked: no child starts with the same block. A leaf that only the
        caller holds grows in place.
        """
        self.pool.enter_tree(blocks)
        if node.parent is not None and node.locks == 1 and not node.children and node.is_on_device:
            end = node.end
            node.tokens += tokens
            node.size += len(blocks)
            node.blocks += blocks
            node.last_step = step_id
            if self.watcher is not None:
                self.watcher.on_grown(node, end, bytes(tokens[: self.width]))
            return node
        child = Node(node, tokens, blocks, node.end)
        child.locks = 1
        child.last_step = step_id
        self._adopt(node, child)
        if self.watcher is not None:
            self.watcher.on_grown(node, node.end, bytes(tokens[: self.width]))
        return child

    def attach(self, child: Node, count: int, blocks: list[BlockId], step_id: int) -> Node:
        """The first `count` blocks of `child`, which are only on the host, are computed again: into `blocks`.

        `child` hangs below a node that the caller locks, and nobody locks it. Returns the node that now ends with
        the blocks, locked once. What hangs below it was computed from the other copy and is unproven like it: if
        this one turns out bad it leaves the tree with all of it.
        """
        node = self._split(child, count) if count < child.size else child
        self.pool.enter_tree(blocks)
        node.blocks = blocks
        node.locks = 1
        for inner in _leaves_first(node):
            inner.num_proven = 0
            inner.last_step = step_id
        return node

    def prove(self, node: Node, step_id: int) -> None:
        """A row drew a token from finite logits over the path to `node` in `step_id`."""
        step: Node | None = node
        while step is not None and not step.proven:
            if step.last_step <= step_id:
                step.num_proven = step.size
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

    def split(self, node: Node, depth: int) -> Node:
        """The node that ends `depth` blocks from the root, cut out of `node` if need be; `node` keeps its tail."""
        return node if depth == node.end else self._split(node, depth - node.start)

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Cut `node` after `num_blocks` blocks. The upper part is new and returned; `node` keeps its tail.

        before   parent -> [ 0 .......... n ) node
        after    parent -> [ 0 .. k ) upper -> [ k .. n ) node     locks of both: node's
        """
        parent = node.parent
        assert parent is not None
        cut = num_blocks * self.width
        upper = Node(parent, node.tokens[:cut], node.blocks[:num_blocks], node.start)
        upper.size = num_blocks
        upper.locks, upper.last_step, upper.used_in = node.locks, node.last_step, node.used_in
        upper.num_proven = min(node.num_proven, num_blocks)
        node.num_proven -= upper.num_proven
        first = bytes(node.tokens[: self.width])
        bucket = parent.children[self.key(first)]
        bucket[bucket.index(node)] = upper  # same first block: the parent's order stands
        was_on_device = bool(node.blocks)
        del node.tokens[:cut]
        del node.blocks[:num_blocks]
        node.start += num_blocks
        node.size -= num_blocks
        node.parent = upper
        self._adopt(upper, node)
        if node.locks == 0 and was_on_device:
            self.ring.add_after(node, upper)
            if not node.blocks:
                self.ring.remove(node)
        if self.host is not None:
            self.host.on_split(upper, node)
        if self.watcher is not None:
            self.watcher.on_split(upper, node)
        return upper

    def _adopt(self, parent: Node, child: Node) -> None:
        first = bytes(child.tokens[: self.width])
        self.num_nodes += 1
        parent.children.setdefault(self.key(first), []).append(child)
        insort(parent.order, first)

    # ---- eviction -------------------------------------------------------------------------------

    def evict(self, count: int) -> int:
        """Free exactly `count` blocks, least recently used first, tails first; return how many there were."""
        freed = 0
        while freed < count and (node := self.ring.oldest()) is not None:
            freed += self._evict_tail(node, count - freed)
        self.num_evicted += freed
        return freed

    def _evict_tail(self, node: Node, count: int) -> int:
        """Free up to `count` device blocks of the oldest node; 0 when it was cut in two first: look again."""
        num_lost = len(node.blocks) - len(node.host_blocks)  # without a copy on the host or on its way there
        if num_lost > 0 and node.children:
            assert self.host is not None, "the oldest unlocked node is not a leaf"
            if self.host.rescue(node):
                return 0
            self._drop_children(node)
        count = min(count, len(node.blocks))
        self._free_tail(node, count)
        self.settle(node)
        return count

    def drop(self, node: Node) -> None:
        """Take `node` and all below it out of the tree, on both tiers. Nobody may lock them any more."""
        for inner in list(_leaves_first(node)):
            if inner.job_in is not None and self.host is not None:
                self.host.cancel(inner.job_in, node)
        for inner in list(_leaves_first(node)):
            if inner.parent is not None:  # else the end of its copy has taken it along
                self._remove(inner)

    def _drop_children(self, node: Node) -> None:
        for child in [child for bucket in node.children.values() for child in bucket]:
            self.drop(child)

    def drop_namespace(self, namespace: Hashable) -> None:
        """Forget everything under `namespace` that is not locked, and the namespace itself once it is empty."""
        root = self._roots.get(namespace)
        if root is None:
            return
        for node in list(_leaves_first(root)):
            if node is not root and node.locks == 0:
                self._remove(node)
        self.forget_if_empty(namespace)

    def forget_if_empty(self, namespace: Hashable) -> None:
        """Drop a namespace's root when nothing hangs below it and nobody holds it."""
        root = self._roots.get(namespace)
        if root is not None:
            self._forget_idle(root)

    def clear(self) -> None:
        """Forget every run that is neither locked nor kept on the host for a preempted sequence."""
        for node in list(self.nodes()):
            if node.locks == 0 and node.pins == 0:
                self._remove(node)

    def _remove(self, node: Node) -> None:
        """Take a childless node out, and free its blocks of both tiers."""
        assert node.locks == 0, "a locked node is dropped"
        self._free_tail(node, len(node.blocks))
        if self.host is not None:
            self.host.forget(node)
        self.settle(node)

    def _free_tail(self, node: Node, count: int) -> None:
        """Free the last `count` device blocks of an unlocked node."""
        if count == 0:
            return
        kept = len(node.blocks) - count
        freed = node.blocks[kept:]
        del node.blocks[kept:]
        # Tail first, so that the head of the run is the first to be handed out again: tables stay ascending.
        self.pool.free_from_tree(freed[::-1], node.used_in)
        self.num_evictable -= count
        if not node.blocks:
            self.ring.remove(node)

    def settle(self, node: Node) -> None:
        """Cut off the part of an unlocked run that is on no tier any more, with all that hangs on it."""
        size = max(len(node.blocks), len(node.host_blocks))
        if size == node.size:
            return
        self._drop_children(node)
        first = bytes(node.tokens[: self.width])
        node.size = size
        del node.tokens[size * self.width :]
        node.num_proven = min(node.num_proven, size)
        if size == 0:
            self._disown(node, first)
        elif self.watcher is not None:
            self.watcher.on_shrunk(node)

    def _disown(self, node: Node, first: bytes) -> None:
        parent = node.parent
        assert parent is not None
        self.num_nodes -= 1
        if self.host is not None:
            self.host.on_disown(node, parent)
        key = self.key(first)
        bucket = parent.children[key]
        bucket.remove(node)
        if not bucket:
            del parent.children[key]
        del parent.order[bisect_left(parent.order, first)]
        node.parent = None
        if self.watcher is not None:
            self.watcher.on_disowned(node)
        if parent.parent is None:
            self._forget_idle(parent)

    def _forget_idle(self, root: Node) -> None:
        """Namespaces come with every salt: one that nobody holds and that caches nothing leaves no trace."""
        assert isinstance(root, Root), "only a root is without a parent"
        if root.locks == 0 and not root.children:
            self._roots.pop(root.namespace, None)

    # ---- audit ----------------------------------------------------------------------------------

    def namespaces(self) -> list[Hashable]:
        """Namespaces that have a root."""
        return list(self._roots)

    def roots(self) -> list[Node]:
        """The roots of all namespaces."""
        return list(self._roots.values())

    def nodes_below(self, root: Node) -> Iterator[Node]:
        """`root` and every node below it, parents after their children."""
        return _leaves_first(root)

    def nodes(self) -> Iterator[Node]:
        """Every node except the roots, parents after their children."""
        for root in list(self._roots.values()):
            for node in _leaves_first(root):
                if node is not root:
                    yield node

    def oldest_first(self) -> Iterator[Node]:
        """The unlocked nodes on the device in eviction order."""
        return iter(self.ring)


def _leaves_first(node: Node) -> Iterator[Node]:
    stack = [(node, False)]
    while stack:
        current, seen = stack.pop()
        if seen:
            yield current
            continue
        stack.append((current, True))
        stack.extend((child, False) for bucket in current.children.values() for child in bucket)
