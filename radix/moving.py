"""What sequences want of the host tier: to be saved when they are preempted, to be fetched when they come back.

transaction             device blocks                     host blocks            lock, pin
---------------------   -------------------------------   --------------------   ------------------------------
swap out                freed by the release after it     taken for the copy     path pinned
bring in                taken, filled by the copy         kept                   locked, pin given back
bring in ahead          the same, nobody's                kept                   locked by the copy alone
arrival                 readable                          kept: on both tiers    the copy's lock given back
arrival of a failed     run dropped with what hangs on it, on both tiers; its holders hold nothing any more
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..protocol.ids import BlockId, CopyId, SequenceId
from ..protocol.messages import CopyDirection
from .copies import CopyJob
from .holding import Holding
from .host import HostTier
from .lookup import Beyond, Match
from .node import Node
from .tokens import TokenLog
from .tree import PrefixTree

MayFetch = Callable[[int, int], bool]
"""(first token, number of tokens on the host only): whether to copy them in rather than compute them again."""


class Arrived(NamedTuple):
    """What the end of a copy means for sequences."""

    ready: list[SequenceId]
    """All they waited for is there."""
    lost: list[SequenceId]
    """What they waited for will not come; they hold nothing any more."""


class Mover:
    """Moves the runs of sequences between the tiers. `release` lets a holding go, `free_up` makes device blocks free."""

    def __init__(
        self, tree: PrefixTree, host: HostTier, *, release: Callable[[Holding], None], free_up: Callable[[int], None]
    ) -> None:
        self.tree = tree
        self.host = host
        self._release = release
        self._free_up = free_up

    # ---- out ------------------------------------------------------------------------------------

    def swap_out(self, holding: Holding, later: Iterable[SequenceId]) -> bool:
        """Copy what only `holding` locks to the host and keep its path there; it is released next.

        `later`: preempted sequences behind it in order, the last first, whose host blocks it may take; iterated twice.
        False, and nothing is copied or kept, when there is no room.
        """
        assert holding.node is not None, "swapped out without holding anything"
        self.host.unpin(holding.seq_id)
        self.host.pin(holding.seq_id, holding.node)
        if self.host.save(holding.node, later):
            return True
        self.host.unpin(holding.seq_id)
        return False

    # ---- in -------------------------------------------------------------------------------------

    def beyond(self, match: Match, log: TokenLog, limit: int, may_fetch: MayFetch) -> Beyond | None:
        """How far a sequence gets, up to `limit` tokens, if it waits for copies: those under way, and a fetch if allowed."""
        found = self.tree.beyond(match, log, limit)
        if found is None or not found.num_host:
            return found
        size = self.tree.block_size
        start = match.depth + found.num_moving
        if may_fetch(start * size, found.num_host * size):
            return found
        return self._cut(found, start) if found.num_moving else None

    def bring_in(self, holding: Holding, match: Match, beyond: Beyond) -> list[BlockId]:
        """Lock the path to the end of `beyond` for `holding`, fetch what is only on the host; return its blocks after `match`.

        `holding` waits for `holding.jobs` then.
        """
        node = self.tree.split(beyond.node, beyond.depth)
        self.tree.lock_path(node)
        holding.node = node
        jobs = set(beyond.jobs)
        job = self._fetch(holding.seq_id, node, beyond)
        if job is not None:
            jobs.add(job)
        holding.jobs = jobs
        for job in jobs:
            job.waiting.append(holding)
        return _path_blocks(node, match.depth)

    def bring_ahead(self, seq_id: SequenceId, beyond: Beyond) -> None:
        """Fetch what is only on the host although nobody locks it yet: it will be cache when it has arrived."""
        node = self.tree.split(beyond.node, beyond.depth)
        self.tree.lock_path(node)
        self._fetch(seq_id, node, beyond)
        self.tree.unlock(node)

    def _fetch(self, seq_id: SequenceId, node: Node, beyond: Beyond) -> CopyJob | None:
        if not beyond.num_host:
            return None
        self.host.unpin(seq_id)
        self.host.pin(seq_id, node)  # freeing device blocks may displace host blocks: not these
        self._free_up(beyond.num_host)
        return self.host.fetch(node, beyond.depth - beyond.num_host)

    def _cut(self, beyond: Beyond, depth: int) -> Beyond:
        node = beyond.node
        while node.start >= depth and node.parent is not None:
            node = node.parent
        return beyond._replace(node=node, depth=depth, num_host=0)

    # ---- ends -----------------------------------------------------------------------------------

    def on_copy_done(self, direction: CopyDirection, copy_id: CopyId, *, ok: bool) -> Arrived:
        """A copy has ended, well or not."""
        job = self.host.on_copy_done(direction, copy_id, ok=ok)
        waiting, job.waiting = job.waiting, []
        if ok:
            for holding in waiting:
                holding.jobs.discard(job)
            return Arrived([holding.seq_id for holding in waiting if not holding.jobs], [])
        for holding in waiting:
            self._release(holding)
        self.host.strip(job)
        return Arrived([], [holding.seq_id for holding in waiting])

    def let_go(self, holding: Holding) -> None:
        """`holding` waits for nothing any more."""
        for job in holding.jobs:
            if holding in job.waiting:  # else it has just ended
                job.waiting.remove(holding)
        holding.jobs = set()

    def cancel_unwanted(self) -> bool:
        """Give back the device blocks of copies in that no sequence waits for; whether there were any."""
        unwanted = [job for job in self.host.lanes.jobs() if job.anchor is not None and not job.waiting]
        for job in reversed(unwanted):  # the deeper ones of a path first
            self.host.cancel(job)
        return bool(unwanted)

    def cancel_all(self, root: Node) -> None:
        """Nobody wants anything below `root` any more."""
        for node in list(self.tree.nodes_below(root)):
            if node.job_in is not None:
                self.host.cancel(node.job_in)


def _path_blocks(node: Node | None, depth: int) -> list[BlockId]:
    """Device blocks on the path to `node` after the first `depth`."""
    blocks: list[BlockId] = []
    while node is not None and node.end > depth:
        blocks[:0] = node.blocks[max(0, depth - node.start) :]
        node = node.parent
    return blocks
