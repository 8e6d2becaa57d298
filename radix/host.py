"""The host tier: KV of runs that left the device, or may have to, in blocks of a second pool.

    copy out    `save` (a preempted sequence's runs), `rescue` (a run whose eviction would orphan what is on the
                host below it), `write_back` (ahead of need). Head first, so a run's host blocks are a prefix of it.
                The device blocks may be evicted and handed on meanwhile: whoever gets them waits for the copy.
    copy in     `fetch`: a locked path's host runs get device blocks at once and their content later. The job holds
                a lock on the path's end. Nobody reads them before the copy has ended well.
    copy failed what it should have brought is gone: the run and what hangs below it, where no other tier has it.
    eviction    least recently used first, tails first. A run that is whole on the device loses its copy without
                being missed; of one that is not, the deepest descendant goes first.

A preempted sequence *pins* its path: those host blocks stay. Only another preemption may take them, of a sequence
before it in order, and then the pin goes as a whole. A copy that nobody wants any more is cancelled when its blocks
are wanted: it runs to its end on the device, and the blocks it touches are handed on under its fence.

    invariant                                                          kept by
    ----------------------------------------------------------------   --------------------------------
    a node is in `_idle` with its number of host blocks if it has       refresh, after every change
    any and no copy, and no pin, concerns it
    pins of a node = pinned paths through it                            pin, unpin, on_split, forget
    job.nodes = nodes whose job_in or job_out it is                     on_split, fetch, save, forget
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from ..protocol.ids import BlockId, CopyId, SequenceId
from ..protocol.messages import CopyDirection
from .copies import CopyJob, Lanes
from .node import Node
from .pool import BlockPool, latest

if TYPE_CHECKING:
    from .tree import PrefixTree

LOOK_AHEAD = 16
"""Nodes, the nearest to eviction, among which `write_back` looks for one without a copy."""


class HostTier:
    """Host residency of the runs of one tree, and the copies between its two tiers."""

    def __init__(self, tree: PrefixTree, num_blocks: int) -> None:
        self.tree = tree
        self.pool = BlockPool(num_blocks)
        self.lanes = Lanes()
        self.num_evictable = 0
        self._idle: OrderedDict[Node, int] = OrderedDict()
        self._pins: dict[SequenceId, Node] = {}

    @property
    def num_available(self) -> int:
        """Host blocks that could be written to without taking a preempted sequence's."""
        return self.pool.num_free + self.num_evictable

    def room(self, wanted: int, later: Iterable[SequenceId]) -> int:
        """Host blocks that a preempted sequence may have, about `wanted` if there are.

        Those count that `later`, sequences behind it in order, keep alone.
        """
        count = self.num_available
        for seq_id in later:
            if count >= wanted:
                break
            for node in _upwards(self._pins.get(seq_id)):
                if node.pins > 1:
                    break
                if node.job_in is None and node.job_out is None:
                    count += len(node.host_blocks)
        return count

    # ---- pins -----------------------------------------------------------------------------------

    def pin(self, seq_id: SequenceId, node: Node) -> None:
        """Keep the host blocks on the path to `node` for a sequence that was preempted."""
        assert seq_id not in self._pins, f"sequence {seq_id} pins twice"
        self._pins[seq_id] = node
        for step in _upwards(node):
            step.pins += 1
            self.refresh(step)

    def unpin(self, seq_id: SequenceId) -> None:
        """The sequence is back, or will not come back."""
        node = self._pins.pop(seq_id, None)
        if node is not None:
            for step in _upwards(node):
                step.pins -= 1
                self.refresh(step)

    def pinned(self) -> dict[SequenceId, Node]:
        """The end of each pinned path."""
        return self._pins

    def idle(self) -> OrderedDict[Node, int]:
        """Nodes whose host blocks may be evicted, the least recently used first, and how many those are."""
        return self._idle

    # ---- copies out -----------------------------------------------------------------------------

    def missing(self, node: Node) -> list[Node]:
        """Nodes on the path to `node` that only one sequence locks and that are not all on the host, bottom up."""
        alone = []
        for step in _upwards(node):
            if step.locks > 1:
                break
            if len(step.host_blocks) < len(step.blocks):
                alone.append(step)
        return alone

    def save(self, node: Node, later: Iterable[SequenceId]) -> bool:
        """Copy to the host what only one sequence locks on the path to `node`, which is pinned already.

        Where room is lacking, cold runs go, and then the pins of `later`, one sequence after the other. False, and
        nothing is copied, when it lacks still.
        """
        missing = self.missing(node)
        count = sum(len(step.blocks) - len(step.host_blocks) for step in missing)
        if count > self.room(count, later):
            return False  # no pin is to go for nothing
        for seq_id in later:
            if count <= self.num_available:
                break
            self.unpin(seq_id)
        if count:
            self._copy_out([self._uncopied(step) for step in reversed(missing)])
        return True

    def rescue(self, node: Node) -> bool:
        """`node` is about to be evicted, and host runs hang below it: copy what it lacks. False: there is no room."""
        count = len(node.blocks) - len(node.host_blocks)
        if count > (self.num_available if node.pins else self._room_ahead(count)):
            return False
        self._copy_out([self._uncopied(node)])
        return True

    def write_back(self, most: int) -> int:
        """Copy up to `most` blocks that are nearest to eviction, if there is room that nobody keeps; return how many."""
        for node in islice(self.tree.ring, LOOK_AHEAD):
            if len(node.host_blocks) < len(node.blocks) and node.job_out is None:
                return self._copy_ahead(node, most)
        return 0

    def save_ahead(self, node: Node, most: int) -> int:
        """The same for a sequence that runs and may have to give its blocks up next; `node` ends its path."""
        missing = [step for step in self.missing(node) if step.job_out is None]
        return self._copy_ahead(missing[-1], most) if missing else 0

    def _copy_ahead(self, node: Node, most: int) -> int:
        count = min(most, len(node.blocks) - len(node.host_blocks))
        count = min(count, self._room_ahead(count))
        if count:
            self._copy_out([node], count)
        return count

    def _room_ahead(self, wanted: int) -> int:
        """Free host blocks, and those of the least recently used runs that are not on the device, about `wanted` if there are.

        To displace copies of what is on the device would be to copy in circles: those are near eviction too. One that
        stands first, because whoever holds it has not let go of it for long, goes to the end.
        """
        for _ in range(LOOK_AHEAD):
            first = next(iter(self._idle), None)
            if first is None or not first.blocks:
                break
            self._idle.move_to_end(first)
        found = self.pool.num_free
        for node, count in self._idle.items():
            if found >= wanted or node.blocks:
                break
            found += count
        return found

    def _uncopied(self, node: Node) -> Node:
        """`node`, or its tail if a copy of its head is on its way already."""
        if node.job_out is not None:
            self.tree.split(node, node.start + len(node.host_blocks))
        return node

    def _copy_out(self, nodes: list[Node], most: int | None = None) -> None:
        """One job for what `nodes`, from the top down, lack on the host, or for the first `most` blocks of it."""
        sources: list[BlockId] = []
        counts = []
        for node in nodes:
            blocks = node.blocks[len(node.host_blocks) :][:most]
            counts.append(len(blocks))
            sources += blocks
        self._make_room(len(sources))
        targets = self.pool.take(len(sources))
        self.pool.enter_tree(targets)
        job = self.lanes.add("out", sources, targets)
        used = 0
        for node, count in zip(nodes, counts, strict=True):
            node.host_blocks += targets[used : used + count]
            node.num_out = count
            node.job_out = job
            job.nodes.add(node)
            used += count
            self.refresh(node)
        self._mark(job)

    # ---- copies in ------------------------------------------------------------------------------

    def fetch(self, node: Node, depth: int) -> CopyJob:
        """Bring in what the path to `node` has on the host only, below `depth` blocks, which the caller locks.

        Its device blocks are taken from the pool, where the caller has made sure of them.
        """
        path = [step for step in _upwards(node) if step.end > depth]
        sources: list[BlockId] = []
        targets: list[BlockId] = []
        job = self.lanes.add("in", sources, targets)
        for step in reversed(path):
            if step.job_in is not None and len(step.blocks) < step.size:
                self.tree.split(step, step.start + len(step.blocks))
            count = step.size - len(step.blocks)
            if count == 0:
                continue
            sources += step.host_blocks[len(step.blocks) : step.size]
            blocks = self.tree.pool.take(count, oldest=True)
            self.tree.pool.enter_tree(blocks)
            targets += blocks
            step.blocks += blocks
            step.num_in = count
            step.job_in = job
            job.nodes.add(step)
            self.refresh(step)
        job.anchor = node
        self.tree.lock_path(node)
        self._mark(job)
        return job

    def cancel(self, job: CopyJob, top: Node | None = None) -> None:
        """Nobody waits for a copy in any more: its device blocks may be handed on, under its fence.

        With `top`: nobody waits for what it brings to `top` and below, but perhaps for what it brings above that.
        """
        nodes = [node for node in job.deepest_first() if top is None or node.start >= top.start]
        for node in nodes:
            freed = node.blocks[node.num_ready :]
            del node.blocks[node.num_ready :]
            node.num_in, node.job_in = 0, None
            self.tree.pool.free_from_tree(freed[::-1], node.used_in)
            self.refresh(node)
        job.nodes.difference_update(nodes)
        anchor, job.anchor = job.anchor, None
        if job.nodes and top is not None and top.parent is not None:
            job.anchor = top.parent
            self.tree.lock_path(top.parent)
        if anchor is not None:
            self.tree.unlock(anchor)

    # ---- the end of a copy ----------------------------------------------------------------------

    def on_copy_done(self, direction: CopyDirection, copy_id: CopyId, *, ok: bool) -> CopyJob:
        """A copy has ended. What a failed one should have brought is for the caller to drop (`strip`)."""
        job = self.lanes.pop(direction, copy_id)
        done = self.lanes.done()
        self.pool.on_copy_done(done)
        self.tree.pool.on_copy_done(done)
        if ok:
            for node in job.deepest_first():
                self._arrive(node, direction)
            job.nodes.clear()
            if job.anchor is not None:
                self.tree.unlock(job.anchor)
                job.anchor = None
        return job

    def strip(self, job: CopyJob) -> None:
        """A copy has failed, and nobody holds what it should have brought: that leaves the tree."""
        if job.direction == "out":
            for node in reversed(job.deepest_first()):
                if node.job_out is job:
                    self._lose_copy(node)
            return
        top = min(job.nodes, key=lambda node: node.start, default=None)
        if top is None:
            return
        start = top.start + top.num_ready
        self.cancel(job)
        if start > top.start:
            self.tree.split(top, start)  # what it had before stays, and `top` is its tail
        if top.parent is not None:
            self.tree.drop(top)

    def _lose_copy(self, node: Node) -> None:
        blocks = node.host_blocks[node.num_saved :]
        del node.host_blocks[node.num_saved :]
        node.num_out, node.job_out = 0, None
        self.pool.free_from_tree(blocks[::-1], 0)
        self.refresh(node)
        self.tree.settle(node)

    def _arrive(self, node: Node, direction: CopyDirection) -> None:
        if direction == "out":
            node.num_out, node.job_out = 0, None
        else:
            node.num_in, node.job_in = 0, None
        self.refresh(node)

    # ---- eviction -------------------------------------------------------------------------------

    def _make_room(self, count: int) -> None:
        while self.pool.num_free < count:
            assert self._idle, "more host blocks wanted than were counted as available"
            self._evict_tail(next(iter(self._idle)), count - self.pool.num_free)

    def _evict_tail(self, node: Node, count: int) -> None:
        """Free up to `count` host blocks off the tail of `node`, or of what hangs on them."""
        while not node.is_on_device and node.children:
            node = next(iter(node.children.values()))[0]  # on the host only, as all below is, and nobody's
        if node.job_out is not None:
            self.tree.drop(node)  # its copy is still on its way, to nobody
            return
        count = min(count, len(node.host_blocks))
        freed = node.host_blocks[len(node.host_blocks) - count :]
        del node.host_blocks[len(node.host_blocks) - count :]
        self.pool.free_from_tree(freed[::-1], 0)
        self.refresh(node)
        self.tree.settle(node)

    def touch(self, node: Node) -> None:
        """`node` has just been used."""
        if node in self._idle:
            self._idle.move_to_end(node)

    def refresh(self, node: Node) -> None:
        """Count `node` among the evictable if it is: after any change to its host blocks, jobs or pins."""
        count = len(node.host_blocks)
        if node.pins or node.job_out is not None or node.job_in is not None:
            count = 0
        before = self._idle.get(node, 0)
        if count == before:
            return
        self.num_evictable += count - before
        if count:
            self._idle[node] = count
        else:
            del self._idle[node]

    # ---- what the tree does to nodes -------------------------------------------------------------

    def on_split(self, upper: Node, lower: Node) -> None:
        """`lower`'s first blocks have become `upper`'s; `upper` has its device blocks already."""
        moving_in, saved = lower.num_in, lower.num_saved
        lower.num_in = min(moving_in, len(lower.blocks))
        upper.num_in = moving_in - lower.num_in
        upper.host_blocks = lower.host_blocks[: upper.size]
        del lower.host_blocks[: upper.size]
        upper.num_out = max(0, len(upper.host_blocks) - saved)
        lower.num_out = min(lower.num_out - upper.num_out, len(lower.host_blocks))
        upper.job_in = self._hand_over(lower.job_in, upper, upper.num_in, lower, lower.num_in)
        upper.job_out = self._hand_over(lower.job_out, upper, upper.num_out, lower, lower.num_out)
        lower.job_in = lower.job_in if lower.num_in else None
        lower.job_out = lower.job_out if lower.num_out else None
        upper.pins = lower.pins
        self.refresh(lower)
        self.refresh(upper)

    @staticmethod
    def _hand_over(job: CopyJob | None, upper: Node, num_upper: int, lower: Node, num_lower: int) -> CopyJob | None:
        """The part of `job` that is `upper`'s from now on."""
        if job is None:
            return None
        if num_upper:
            job.nodes.add(upper)
        if not num_lower:
            job.nodes.discard(lower)
        return job if num_upper else None

    def forget(self, node: Node) -> None:
        """`node` leaves the tree: free its host blocks, under their fences."""
        for job in (node.job_in, node.job_out):
            if job is not None:
                job.nodes.discard(node)
        node.job_in = node.job_out = None
        node.num_in = node.num_out = 0
        blocks, node.host_blocks = node.host_blocks, []
        self.pool.free_from_tree(blocks[::-1], 0)
        self.refresh(node)

    def on_disown(self, node: Node, parent: Node) -> None:
        """`node`, which nothing hangs below, is gone: the pinned paths that ended there end with its parent."""
        if node.pins:
            for seq_id, end in self._pins.items():
                if end is node:
                    self._pins[seq_id] = parent
            node.pins = 0

    # ---- pieces ---------------------------------------------------------------------------------

    def _mark(self, job: CopyJob) -> None:
        """The job waits for what its blocks remember, and they remember the job."""
        on_device, on_host = (job.sources, job.targets) if job.direction == "out" else (job.targets, job.sources)
        job.after = latest(self.tree.pool.fences(on_device), self.pool.fences(on_host))
        self.tree.pool.on_copy_sent(on_device, job.direction, job.copy_id)
        self.pool.on_copy_sent(on_host, job.direction, job.copy_id)


def _upwards(node: Node | None) -> Iterable[Node]:
    while node is not None:
        yield node
        node = node.parent
