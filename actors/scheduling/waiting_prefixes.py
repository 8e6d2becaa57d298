"""Which of the waiting has the longest cached prefix, kept up while the tree changes.

Every sequence that waits has a *place*: the end of what the tree holds of its prompt, on whichever tier. A place is a
node and a depth in blocks within it; a namespace's root stands for its node there, whether it exists or not. The
sequences of a place are sorted into *buckets* by the block that they need next.

    the tree changes                           what moves
    ----------------------------------------   ---------------------------------------------------------
    a path goes on below a place               the bucket of the new block, each as far as the tree goes
    a node is cut in two                       the places of its head, as they are, to the new node
    a node loses its tail, or is gone          the places behind its new end, to that end or to its parent's

So a step costs what changes for those that wait, not how many they are. A heap of (depth, age) answers who is first;
whoever has moved has a new entry in it, and old ones are dropped when they come to its top.

Those that run and still prefill have places as well. Whoever waits in the bucket of one *follows* it: it needs next what
that one is about to compute. A follower has no place and is not offered. It is placed again when the one it follows
has computed all that the two prompts share, or has stopped. If two prompts share more than the tree holds of the
waiting one, both are at the same place and need the same block, so nobody is missed.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush

from ...protocol.ids import SequenceId
from ...radix.node import Node, Root
from ...radix.tree import PrefixTree
from .sequence import Sequence, State

LEAST_STALE = 64
"""Heap entries beyond four for each that waits, before the heap is made anew."""


class _Place:
    __slots__ = ("buckets", "depth", "owner")

    def __init__(self, owner: Hashable, depth: int) -> None:
        self.owner = owner
        self.depth = depth
        self.buckets: dict[bytes, dict[SequenceId, _Member]] = {}


class _Member:
    """One that waits, or one that runs and computes its prompt. `place` is None while it follows `leader`."""

    __slots__ = ("followers", "is_computing", "leader", "limit", "next_block", "place", "seq")

    def __init__(self, seq: Sequence, *, is_computing: bool) -> None:
        self.seq = seq
        self.is_computing = is_computing
        self.limit = len(seq.log) - (not is_computing)  # a lookup leaves the last token to be computed
        self.place: _Place | None = None
        self.next_block = b""
        self.leader: _Member | None = None
        self.followers: list[tuple[int, SequenceId]] = []  # a heap of the blocks shared with each, stale ones included


class WaitingPrefixes:
    """Implements `TreeWatcher`."""

    def __init__(self) -> None:
        self._waiting: dict[SequenceId, _Member] = {}
        self._computing: dict[SequenceId, _Member] = {}
        self._places: dict[Hashable, dict[int, _Place]] = {}
        self._heap: list[tuple[int, SequenceId]] = []
        self._swept_after = -1

    def watch(self, tree: PrefixTree) -> None:
        """Follow this tree. It is empty, and nobody runs."""
        self._tree = tree
        tree.watcher = self
        self._places.clear()
        self._computing.clear()
        self._heap.clear()
        self._swept_after = -1
        for member in self._waiting.values():
            member.leader = member.place = None
            self._settle(member)

    # ---- who waits and who computes -------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """It waits."""
        member = self._waiting[seq.seq_id] = _Member(seq, is_computing=False)
        self._settle(member)

    def remove(self, seq: Sequence) -> None:
        """It does not wait any more, nor compute. No-op for one that did neither."""
        member = self._waiting.pop(seq.seq_id, None)
        if member is not None:
            self._lift(member)
            member.leader = None
        member = self._computing.get(seq.seq_id)
        if member is not None:
            self._stop(member)

    def begin(self, seq: Sequence) -> None:
        """It was admitted: it computes what the cache lacks of what is known of it."""
        self.remove(seq)
        member = self._computing[seq.seq_id] = _Member(seq, is_computing=True)
        self._settle(member)

    def longest(self) -> Sequence | None:
        """The sequence with the most cached tokens, the oldest among equals; None when all follow others, or none wait."""
        self._sweep()
        while self._heap:
            depth, seq_id = self._heap[0]
            member = self._waiting.get(seq_id)
            if member is not None and member.place is not None and member.place.depth == -depth:
                return member.seq
            heappop(self._heap)
        return None

    def _sweep(self) -> None:
        """Let go of who has computed its prompt without entering all of it. Once a step: that is when it can have."""
        if self._swept_after == self._tree.pool.used_in:
            return
        self._swept_after = self._tree.pool.used_in
        for member in list(self._computing.values()):
            if member.seq.state not in (State.RUNNING, State.FETCHING) or not member.seq.is_prefilling:
                self._stop(member)

    # ---- places ---------------------------------------------------------------------------------

    def _settle(self, member: _Member, below: Node | None = None) -> None:
        """Find the place of one that has none: as far as the tree goes, looking from `below` on."""
        seq = member.seq
        namespace = seq.holding.namespace
        start = below if below is not None else self._tree.peek(namespace)
        if start is None:
            self._put(member, _root_key(namespace), 0)
            return
        node, depth = self._tree.deepest(start, seq.log, member.limit)
        self._put(member, _key(node), depth)

    def _put(self, member: _Member, owner: Hashable, depth: int) -> None:
        size = self._tree.block_size
        whole = (depth + 1) * size <= member.limit
        next_block = member.next_block = member.seq.log.block(depth, size) if whole else b""
        place = self._places.get(owner, {}).get(depth)
        others = place.buckets.get(next_block) if place is not None and next_block else None
        leader = next(iter(others.values())) if others else None
        if leader is not None and leader.is_computing and not member.is_computing:
            self._follow(member, leader)
            return
        if place is None:
            place = self._places.setdefault(owner, {})[depth] = _Place(owner, depth)
        if member.is_computing and others and leader is not None and not leader.is_computing:
            followers = place.buckets.pop(next_block)
            self._enter(member, place)
            for follower in followers.values():
                follower.place = None
                self._follow(follower, member)
        else:
            self._enter(member, place)
        if member.is_computing:
            self._release(member, depth)
            if not next_block:
                self._stop(member)
        else:
            self._offer(member, depth)

    def _enter(self, member: _Member, place: _Place) -> None:
        member.place = place
        place.buckets.setdefault(member.next_block, {})[member.seq.seq_id] = member

    def _lift(self, member: _Member) -> None:
        """Take one out of its place, and the place out of the books if it was the last there."""
        place, member.place = member.place, None
        if place is None:
            return
        bucket = place.buckets[member.next_block]
        del bucket[member.seq.seq_id]
        if not bucket:
            del place.buckets[member.next_block]
            self._forget_if_empty(place)

    def _forget_if_empty(self, place: _Place) -> None:
        if not place.buckets:
            del self._places[place.owner][place.depth]
            if not self._places[place.owner]:
                del self._places[place.owner]

    def _offer(self, member: _Member, depth: int) -> None:
        heappush(self._heap, (-depth, member.seq.seq_id))
        if len(self._heap) > 4 * len(self._waiting) + LEAST_STALE:
            placed = [(one.place, seq_id) for seq_id, one in self._waiting.items()]
            self._heap = [(-place.depth, seq_id) for place, seq_id in placed if place is not None]
            heapify(self._heap)

    # ---- twins ----------------------------------------------------------------------------------

    def _follow(self, member: _Member, leader: _Member) -> None:
        member.leader = leader
        limit = min(member.limit, leader.limit)
        heappush(leader.followers, (self._tree.num_common(member.seq.log, leader.seq.log, limit), member.seq.seq_id))

    def _release(self, leader: _Member, depth: float) -> None:
        """Place those again that share no more than `depth` blocks with `leader`."""
        while leader.followers and leader.followers[0][0] <= depth:
            member = self._waiting.get(heappop(leader.followers)[1])
            if member is not None and member.leader is leader:
                member.leader = None
                self._settle(member)

    def _stop(self, leader: _Member) -> None:
        """It computes nothing any more that others wait for."""
        del self._computing[leader.seq.seq_id]
        self._lift(leader)
        self._release(leader, float("inf"))

    # ---- the tree changes -----------------------------------------------------------------------

    def on_grown(self, node: Node, depth: int, first: bytes) -> None:
        """Those who need the new block next go on."""
        place = self._places.get(_key(node), {}).get(depth)
        bucket = place.buckets.pop(first, None) if place is not None else None
        if place is None or bucket is None:
            return
        self._forget_if_empty(place)
        below = node if depth == node.end else node.parent
        for member in bucket.values():
            member.place = None
        for member in bucket.values():
            self._settle(member, below)

    def on_split(self, upper: Node, node: Node) -> None:
        """Places do not move, they have another node."""
        places = self._places.get(node, {})
        for depth in [depth for depth in places if depth <= upper.end]:
            place = places.pop(depth)
            place.owner = upper
            self._places.setdefault(upper, {})[depth] = place
        if not places:
            self._places.pop(node, None)

    def on_shrunk(self, node: Node) -> None:
        """Whoever was farther is at the end now."""
        self._retreat(node, node.end, node)

    def on_disowned(self, node: Node, parent: Node) -> None:
        """Whoever was there is at the parent's end now."""
        self._retreat(node, parent.end, parent)

    def _retreat(self, node: Node, end: int, to: Node) -> None:
        places = self._places.get(node, {})
        for depth in sorted(depth for depth in places if to is not node or depth > end):
            place = places[depth]
            members = [member for bucket in place.buckets.values() for member in bucket.values()]
            place.buckets.clear()
            self._forget_if_empty(place)
            for member in members:
                member.place = None
                self._put(member, _key(to), end)


def _key(node: Node) -> Hashable:
    return _root_key(node.namespace) if isinstance(node, Root) else node


def _root_key(namespace: Hashable) -> Hashable:
    return "root", namespace
