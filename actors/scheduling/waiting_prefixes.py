"""Which of the waiting has the longest cached prefix, kept up while the tree changes.

Every sequence that waits has a *place*: the end of what the tree holds of its prompt, on whichever tier. A place is a
node and a depth in blocks within it; a namespace's root stands for its node there, whether it exists or not. The
sequences of a place are sorted into *buckets* by the block that they need next.

    the tree changes                           what moves
    ----------------------------------------   ---------------------------------------------------------
    a path goes on below a place               the bucket of the new block, each as far as the tree goes
    a node is cut in two                       the places of its head, as they are, to the new node
    a node loses its tail, or is gone          the places behind its new end, to that end or to its parent's

So a step costs what changes for those that wait, not how many they are. Where much changes for many at once (the prompt
that ten thousand wait for is computed), a step places `MOST_PLACED` of them and leaves the others *unplaced* for the next
steps: these are not offered meanwhile, and enough others are. A heap of (depth, age) answers who is first; whoever has
moved has a new entry in it, and old ones are dropped when they come to its top.

Those that run and still prefill have places as well. Whoever waits in the bucket of one *follows* it: it needs next what
that one is about to compute. A follower has no place and is not offered. It is placed again when the one it follows
has computed all that the two prompts share, or has stopped. If two prompts share more than the tree holds of the
waiting one, both are at the same place and need the same block, so nobody is missed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from heapq import heapify, heappop, heappush

from ...protocol.ids import SequenceId
from ...radix.node import Node, Root
from ...radix.tree import PrefixTree
from .sequence import Sequence, State

MOST_PLACED = 24
"""Members placed again in a step; more only if else nobody could be offered and nobody computes either."""
LEAST_STALE = 64
"""Heap entries beyond four for each that waits, before the heap is made anew."""


class _Place:
    __slots__ = ("buckets", "depth", "owner")

    def __init__(self, owner: Hashable, depth: int) -> None:
        self.owner = owner
        self.depth = depth
        self.buckets: dict[bytes, dict[SequenceId, _Member]] = {}


class _Member:
    """One that waits, or one that runs and computes its prompt.

    It has a `place`, or follows `leader`, with which it shares `num_common` blocks; what they say of one that is unplaced is
    out of date.
    """

    __slots__ = ("followers", "is_computing", "leader", "limit", "next_block", "num_common", "place", "seq")

    def __init__(self, seq: Sequence, *, is_computing: bool) -> None:
        self.seq = seq
        self.is_computing = is_computing
        self.limit = len(seq.log) if is_computing else seq.lookup_limit
        self.place: _Place | None = None
        self.next_block = b""
        self.leader: _Member | None = None
        self.num_common = 0
        self.followers: dict[int, dict[SequenceId, _Member]] = {}  # by the number of blocks they share with it


class WaitingPrefixes:
    """Implements `TreeWatcher`."""

    def __init__(self) -> None:
        self._waiting: dict[SequenceId, _Member] = {}
        self._computing: dict[SequenceId, _Member] = {}
        self._places: dict[Hashable, dict[int, _Place]] = {}
        self._heap: list[tuple[int, SequenceId]] = []
        self._unplaced: dict[SequenceId, _Member] = {}
        self._to_place: deque[SequenceId] = deque()  # of these, those first that are longest; ended ones included
        self._num_placed = 0  # in this step
        self._swept_after = -1

    def watch(self, tree: PrefixTree) -> None:
        """Follow this tree. It is empty, and nobody runs."""
        self._tree = tree
        tree.watcher = self
        self._places.clear()
        self._computing.clear()
        self._heap.clear()
        self._unplaced.clear()
        self._to_place.clear()
        self._swept_after = -1
        self._unplace(self._waiting)

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
        while self._unplaced and self._num_placed < MOST_PLACED:
            self._place_one()
        found = self._top()
        while found is None and self._unplaced and not self._computing:
            self._place_one()
            found = self._top()
        return found

    def _place_one(self) -> None:
        member = self._unplaced.pop(self._to_place.popleft(), None)
        if member is not None:
            self._num_placed += 1
            self._settle(member)

    def _top(self) -> Sequence | None:
        num_stale = 0
        while self._heap:
            depth, seq_id = self._heap[0]
            if (place := self._place_of(seq_id)) is not None and place.depth == -depth:
                return self._waiting[seq_id].seq
            heappop(self._heap)
            num_stale += 1
            if num_stale == LEAST_STALE:
                self._make_heap()  # many have moved at once: cheaper than to pop them one by one
        return None

    def _place_of(self, seq_id: SequenceId) -> _Place | None:
        """Where one is that waits, and is to be offered."""
        member = self._waiting.get(seq_id)
        return None if member is None or seq_id in self._unplaced else member.place

    def _sweep(self) -> None:
        """Let go of who has computed its prompt without entering all of it. Once a step: that is when it can have."""
        if self._swept_after == self._tree.pool.used_in:
            return
        self._swept_after = self._tree.pool.used_in
        self._num_placed = 0
        for member in list(self._computing.values()):
            if member.seq.state not in (State.RUNNING, State.FETCHING) or not member.seq.is_prefilling:
                self._stop(member)

    # ---- places ---------------------------------------------------------------------------------

    def _settle(self, member: _Member) -> None:
        """Find the place of one that has none: as far as the tree goes."""
        namespace = member.seq.holding.namespace
        root = self._tree.peek(namespace)
        if root is None:
            self._put(member, _root_key(namespace), 0)
            return
        node, depth = self._tree.deepest(root, member.seq.log, member.limit)
        self._put(member, _key(node), depth)

    def _unplace(self, members: dict[SequenceId, _Member]) -> None:
        """These of one bucket may be elsewhere now. Who computes is placed at once: others wait for it to come on."""
        if _leader_of(members) is not None:
            for member in members.values():
                self._settle(member)
        else:
            self._unplaced.update(members)
            self._to_place.extend(members)

    def _put(self, member: _Member, owner: Hashable, depth: int) -> None:
        size = self._tree.block_size
        is_whole = (depth + 1) * size <= member.limit
        member.next_block = member.seq.log.block(depth, size) if is_whole else b""
        member.place = member.leader = None
        place = self._places.get(owner, {}).get(depth)
        others = place.buckets.get(member.next_block, {}) if place is not None and is_whole else {}
        leader = _leader_of(others)
        if leader is not None and not member.is_computing:
            self._follow(member, leader)
            return
        if place is None:
            place = self._places.setdefault(owner, {})[depth] = _Place(owner, depth)
        if member.is_computing and others and leader is None:
            self._unplace(place.buckets.pop(member.next_block))  # they follow it, when they come by here again
        member.place = place
        place.buckets.setdefault(member.next_block, {})[member.seq.seq_id] = member
        if not member.is_computing:
            self._offer(member, depth)
            return
        self._release(member, depth)
        if not is_whole:
            self._stop(member)

    def _lift(self, member: _Member) -> None:
        """Take one out of where it is, and its place out of the books if it was the last there."""
        seq_id = member.seq.seq_id
        if self._unplaced.pop(seq_id, None) is not None:
            return
        if member.leader is not None:
            del member.leader.followers[member.num_common][seq_id]
        elif member.place is not None:
            bucket = member.place.buckets[member.next_block]
            del bucket[seq_id]
            if not bucket:
                del member.place.buckets[member.next_block]
                self._forget_if_empty(member.place)

    def _forget_if_empty(self, place: _Place) -> None:
        if not place.buckets:
            del self._places[place.owner][place.depth]
            if not self._places[place.owner]:
                del self._places[place.owner]

    def _offer(self, member: _Member, depth: int) -> None:
        heappush(self._heap, (-depth, member.seq.seq_id))
        if len(self._heap) > 4 * len(self._waiting) + LEAST_STALE:
            self._make_heap()

    def _make_heap(self) -> None:
        ids = self._waiting.keys() - self._unplaced.keys()
        self._heap = [(-place.depth, seq_id) for seq_id in ids if (place := self._waiting[seq_id].place) is not None]
        heapify(self._heap)

    # ---- twins ----------------------------------------------------------------------------------

    def _follow(self, member: _Member, leader: _Member) -> None:
        member.leader = leader
        limit = min(member.limit, leader.limit)
        member.num_common = self._tree.num_common(member.seq.log, leader.seq.log, limit)
        leader.followers.setdefault(member.num_common, {})[member.seq.seq_id] = member

    def _release(self, leader: _Member, depth: float) -> None:
        """Place those again that share no more than `depth` blocks with `leader`."""
        for num_common in [num_common for num_common in leader.followers if num_common <= depth]:
            self._unplace(leader.followers.pop(num_common))

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
        self._unplace(bucket)

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
        self._retreat(node, node.end)

    def on_disowned(self, node: Node) -> None:
        """Whoever was there is at the parent's end now."""
        self._retreat(node, 0)

    def _retreat(self, node: Node, end: int) -> None:
        places = self._places.get(node, {})
        for depth in [depth for depth in places if depth > end]:
            place = places[depth]
            buckets = list(place.buckets.values())
            place.buckets.clear()
            self._forget_if_empty(place)
            for bucket in buckets:
                self._unplace(bucket)


def _leader_of(bucket: dict[SequenceId, _Member]) -> _Member | None:
    """Somebody in a bucket who computes: then all there do."""
    first = next(iter(bucket.values()), None)
    return first if first is not None and first.is_computing else None


def _key(node: Node) -> Hashable:
    return _root_key(node.namespace) if isinstance(node, Root) else node


def _root_key(namespace: Hashable) -> Hashable:
    return "root", namespace
