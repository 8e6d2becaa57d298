"""Copies between the tiers, from the decision to the day they have ended."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ..protocol.ids import BlockId, CopyId, StepId
from ..protocol.messages import CopyDirection, Fences

if TYPE_CHECKING:
    from .holding import Holding
    from .node import Node


class CopyJob:
    """One copy: `sources[i]` goes to `targets[i]` of the other tier.

    `nodes` are the runs that have blocks of it in `job_in` or `job_out`; a run that is split or dropped meanwhile
    puts its parts in and takes itself out. A copy in holds a lock on `anchor`, the deepest of them, so that what is
    on its way has a place to arrive at; without an anchor nobody wants it any more. `waiting` cannot
    run before it has ended.
    """

    __slots__ = ("after", "anchor", "copy_id", "direction", "nodes", "sources", "targets", "waiting")

    def __init__(self, direction: CopyDirection, copy_id: CopyId, sources: list[BlockId], targets: list[BlockId]) -> None:
        self.direction = direction
        self.copy_id = copy_id
        self.sources = sources
        self.targets = targets
        self.after = Fences()
        self.nodes: set[Node] = set()
        self.anchor: Node | None = None
        self.waiting: list[Holding] = []

    def deepest_first(self) -> list[Node]:
        """`nodes`, which lie on one path, in an order that is the same in every run."""
        return sorted(self.nodes, key=_start, reverse=True)


def _start(node: Node) -> int:
    return node.start


class Lanes:
    """The copies in flight on the two lanes, numbered in the order in which each lane runs them."""

    def __init__(self) -> None:
        self._in_flight: dict[CopyDirection, deque[CopyJob]] = {"out": deque(), "in": deque()}
        self._last: dict[CopyDirection, CopyId] = {"out": CopyId(0), "in": CopyId(0)}
        self._unsent: list[CopyJob] = []

    def add(self, direction: CopyDirection, sources: list[BlockId], targets: list[BlockId]) -> CopyJob:
        """A new job at the end of its lane."""
        self._last[direction] = CopyId(self._last[direction] + 1)
        job = CopyJob(direction, self._last[direction], sources, targets)
        self._in_flight[direction].append(job)
        self._unsent.append(job)
        return job

    def pop(self, direction: CopyDirection, copy_id: CopyId) -> CopyJob:
        """The first job of a lane has ended."""
        job = self._in_flight[direction].popleft()
        assert job.copy_id == copy_id, f"copy {direction} {copy_id} ended before {job.copy_id}"
        return job

    def take_unsent(self) -> list[CopyJob]:
        """Jobs since the last call, in the order in which they were added."""
        jobs, self._unsent = self._unsent, []
        return jobs

    def is_idle(self, direction: CopyDirection) -> bool:
        """Whether nothing is in flight on that lane."""
        return not self._in_flight[direction]

    def jobs(self) -> list[CopyJob]:
        """Every job in flight."""
        return [*self._in_flight["out"], *self._in_flight["in"]]

    def done(self) -> Fences:
        """Up to which number each lane has ended."""
        ended = {lane: self._last[lane] - len(self._in_flight[lane]) for lane in self._in_flight}
        return Fences(StepId(0), CopyId(ended["out"]), CopyId(ended["in"]))
