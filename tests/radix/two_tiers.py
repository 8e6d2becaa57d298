"""Both tiers' memory beside a `KVCache`: what each block really holds, and operations that run as late as fences allow.

A slot holds the whole prefix up to its token. Steps and copies are queued when they are sent and run in any order
that their fences leave open, so a fence that was forgotten shows as a row that reads what another wrote.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from repertory.protocol.ids import SequenceId, StepId
from repertory.protocol.messages import BlockCopy, Fences
from repertory.radix.cache import KVCache
from repertory.radix.copies import CopyJob
from repertory.radix.node import Node

from .drive import Seq

Place = frozenset[str]
"""Where a block is: of "device", "in" (on its way there), "host" and "out" (on its way there)."""


A, B, C, D = ([10 * n + i for i in range(1, 9)] for n in (1, 2, 3, 4))
"""Eight tokens each, of nothing in common."""


@dataclass
class Step:
    """A step as the device sees it: its fences, its copies, and its rows (table, tokens and namespace, start, end)."""

    step_id: int
    after: Fences = field(default_factory=Fences)
    copies: list[BlockCopy] = field(default_factory=list)
    rows: list[tuple[list[int], tuple[Hashable, tuple[int, ...]], int, int]] = field(default_factory=list)


class TwoTiers:
    """A cache with a host tier, driven as the scheduler does, and its device. Sound after each move."""

    def __init__(self, num_blocks: int = 16, num_host_blocks: int = 16, block_size: int = 1, *, caching: bool = True) -> None:
        self.cache = KVCache(num_blocks, block_size, num_host_blocks=num_host_blocks, enable_prefix_caching=caching)
        self.size = block_size
        self.seqs: dict[int, Seq] = {}
        self.device: list[list[object]] = [[None] * block_size for _ in range(num_blocks)]
        self.on_host: list[list[object]] = [[None] * block_size for _ in range(num_host_blocks)]
        self.queued: dict[str, deque[Step | CopyJob]] = {"step": deque(), "out": deque(), "in": deque()}
        self.completed = {"step": 0, "out": 0, "in": 0}
        self.unsent: list[CopyJob] = []
        self.failing: Callable[[CopyJob], bool] = lambda job: False
        self.lost: list[int] = []
        self.num_opened = 0
        self.step = Step(0)
        self.begin()

    # ---- sequences ------------------------------------------------------------------------------

    def open(self, tokens: Sequence[int], namespace: Hashable = None) -> Seq:
        self.num_opened += 1
        seq = Seq(self.cache.open(SequenceId(self.num_opened), namespace), tokens)
        self.seqs[self.num_opened] = seq
        return seq

    def admit(self, seq: Seq, *, spare: int = 0, fetch: bool = True) -> int | None:
        found = self.cache.admit(seq.holding, seq.log, spare=spare, may_fetch=lambda start, count: fetch)
        self.look()
        if found is not None:
            seq.num_computed = found
        return found

    def chunk(self, seq: Seq, count: int | None = None) -> bool:
        """Look up and compute `count` tokens in this step; False: it has to wait, or there is no room."""
        assert not seq.holding.jobs, "it runs before its blocks have arrived"
        advance = self.cache.advance(seq.holding, seq.log, seq.num_computed)
        self.look()
        seq.num_computed = advance.num_computed
        if advance.copy is not None:
            self.step.copies.append(advance.copy)
        if advance.must_wait:
            return False
        return self.compute(seq, len(seq.log) - seq.num_computed if count is None else count)

    def compute(self, seq: Seq, count: int) -> bool:
        """A row of `count` tokens in this step; False: there is no room."""
        start, end = seq.num_computed, seq.num_computed + count
        if not self.cache.grow(seq.holding, end):
            return False
        self.cache.enter(seq.holding, seq.log, start, end)
        seq.num_computed = end
        self.step.rows.append((seq.table, self._contents(seq), start, end))
        self.look()
        return True

    def serve(self, tokens: Sequence[int], namespace: Hashable = None) -> Seq:
        """A sequence whose tokens are computed and proven."""
        seq = self.open(tokens, namespace)
        assert self.admit(seq) is not None
        assert self.chunk(seq)
        self.begin()
        self.cache.prove(seq.holding, self.cache._step)
        return seq

    def remember(self, tokens: Sequence[int], namespace: Hashable = None) -> None:
        """Leave the whole blocks of `tokens` behind as cache, on the device only."""
        self.close(self.serve(tokens, namespace))

    def preempt(self, seq: Seq, later: Sequence[Seq] = ()) -> bool:
        """Swap out and release; False: there was no room, and it was only released."""
        swapped = self.cache.swap_out(seq.holding, [other.holding.seq_id for other in later])
        self.look()
        self.release(seq)
        return swapped

    def release(self, seq: Seq) -> None:
        self.cache.release(seq.holding)
        seq.num_computed = 0
        self.look()

    def close(self, seq: Seq) -> None:
        self.cache.close(seq.holding)
        del self.seqs[seq.holding.seq_id]
        self.look()

    # ---- the device -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Send the step planned until now, and the copies; the next is planned from here on."""
        sent, self.step = self.step, Step(self.step.step_id + 1)
        after = self.cache.end_step() if sent.step_id else Fences()
        jobs = self.cache.take_copies()
        self._send([job for job in jobs if job.direction == "out"])
        if sent.step_id:
            sent.after = after
            # Tables are sent now: what is entered later is another step's.
            sent.rows = [(list(table), contents, start, end) for table, contents, start, end in sent.rows]
            self.queued["step"].append(sent)
        self._send([job for job in jobs if job.direction == "in"])
        self.cache.begin_step(StepId(self.step.step_id))

    def send(self) -> list[CopyJob]:
        """Send the copies decided on since the last time, without a step; return them."""
        jobs = self.cache.take_copies()
        self._send(jobs)
        return jobs

    def _send(self, jobs: list[CopyJob]) -> None:
        for job in jobs:
            assert len(job.sources) == len(job.targets) > 0
            self.queued[job.direction].append(job)

    def can_run(self, lane: str) -> bool:
        """Whether the first operation of a lane waits for nothing."""
        if not self.queued[lane]:
            return False
        after = self.queued[lane][0].after
        return all(number <= self.completed[name] for name, number in zip(("step", "out", "in"), _numbers(after), strict=True))

    def run(self, lane: str) -> bool:
        """Run the first operation of a lane, if it waits for nothing."""
        if not self.can_run(lane):
            return False
        operation = self.queued[lane].popleft()
        self.completed[lane] += 1
        if isinstance(operation, Step):
            self._run_step(operation)
        else:
            self._run_copy(operation)
        self.look()
        return True

    def settle(self) -> None:
        """Send all there is and run it."""
        self.begin()
        while any(self.run(lane) for lane in ("step", "out", "in")):
            pass
        assert not any(self.queued.values()), "operations that wait for each other"

    def copy(self, ok: bool = True) -> None:
        """Send and run everything, copies well or not."""
        self.failing = lambda job: not ok
        self.settle()
        self.failing = lambda job: False

    def _run_step(self, step: Step) -> None:
        for copy in step.copies:
            self.device[copy.target][: copy.num_tokens] = self.device[copy.source][: copy.num_tokens]
        for table, contents, start, end in step.rows:
            for place in range(start, end):
                self.device[table[place // self.size]][place % self.size] = _prefix(contents, place)
        for table, contents, _, end in step.rows:
            for place in range(end):
                held = self.device[table[place // self.size]][place % self.size]
                assert held == _prefix(contents, place), f"step {step.step_id} reads something else at {place} of {contents}"

    def _run_copy(self, job: CopyJob) -> None:
        source, target = (self.device, self.on_host) if job.direction == "out" else (self.on_host, self.device)
        ok = not self.failing(job)
        for one, other in zip(job.sources, job.targets, strict=True):
            target[other] = list(source[one]) if ok else ["junk"] * self.size
        arrived = self.cache.on_copy_done(job.direction, job.copy_id, ok=ok)
        for seq_id in arrived.lost:
            assert self.seqs[seq_id].holding.node is None, "it is lost, and holds something"
            self.seqs[seq_id].num_computed = 0
            self.lost.append(seq_id)
        assert not any(self.seqs[seq_id].holding.jobs for seq_id in arrived.ready)

    def _contents(self, seq: Seq) -> tuple[Hashable, tuple[int, ...]]:
        return seq.holding.namespace, tuple(seq.log.tolist())

    # ---- facts ----------------------------------------------------------------------------------

    def look(self) -> None:
        assert self.cache.check_integrity() == []

    def where(self) -> dict[tuple[Hashable, tuple[int, ...]], Place]:
        """Where each block of the tree is, by namespace and all tokens up to its end."""
        found: dict[tuple[Hashable, tuple[int, ...]], Place] = {}
        for namespace in self.cache.tree.namespaces():
            root = self.cache.tree.peek(namespace)
            assert root is not None
            for node in self.cache.tree.nodes_below(root):
                tokens = _tokens(node)
                for index in range(node.size):
                    found[namespace, tokens[: (node.start + index + 1) * self.size]] = _place(node, index)
        return found

    def places(self, tokens: Sequence[int], namespace: Hashable = None) -> list[str]:
        """The same for the blocks of one sequence of tokens, as words: "device host"; empty once one is nowhere."""
        where = self.where()
        ends = range(self.size, len(tokens) + 1, self.size)
        found = [where.get((namespace, tuple(tokens[:end])), frozenset()) for end in ends]
        return [" ".join(sorted(place)) for place in found]

    def check_contents(self) -> None:
        """Nothing is under way: every block of the tree holds what the tree says."""
        for namespace in self.cache.tree.namespaces():
            root = self.cache.tree.peek(namespace)
            assert root is not None
            for node in self.cache.tree.nodes_below(root):
                self._check_run(namespace, node)

    def _check_run(self, namespace: Hashable, node: Node) -> None:
        contents = (namespace, _tokens(node))
        for memory, blocks in ((self.device, node.blocks), (self.on_host, node.host_blocks)):
            for index, block in enumerate(blocks):
                start = (node.start + index) * self.size
                expected = [_prefix(contents, place) for place in range(start, start + self.size)]
                assert memory[block] == expected, f"block {block} does not hold what the tree says"

    def check_nothing_is_left(self) -> None:
        """All sequences end, all copies too: without the cache every block is free."""
        for seq in list(self.seqs.values()):
            self.close(seq)
        self.settle()
        self.check_contents()
        self.cache.reset()
        self.look()
        for counts in (self.cache.counts(), self.cache.host_counts()):
            assert counts.free == counts.total
        assert not self.cache.tree.namespaces()


def _prefix(contents: tuple[Hashable, tuple[int, ...]], place: int) -> object:
    namespace, tokens = contents
    return namespace, tokens[: place + 1]


def _tokens(node: Node | None) -> tuple[int, ...]:
    parts: list[int] = []
    while node is not None and node.parent is not None:
        parts[:0] = memoryview(bytes(node.tokens)).cast("i")
        node = node.parent
    return tuple(parts)


def _place(node: Node, index: int) -> Place:
    words = set()
    if index < len(node.blocks):
        words.add("device" if index < node.num_ready else "in")
    if index < len(node.host_blocks):
        words.add("host" if index < node.num_saved else "out")
    return frozenset(words)


def _numbers(after: Fences) -> tuple[int, int, int]:
    return after.step, after.copy_out, after.copy_in


def on_host(tiers: TwoTiers, tokens: list[int]) -> None:
    """Leave `tokens` on the host only."""
    count = len(tokens) // tiers.size
    tiers.remember(tokens)
    tiers.cache.write_back(count)
    tiers.copy()
    tiers.cache.tree.evict(count)
    tiers.look()
    assert tiers.places(tokens) == ["host"] * count


def swapped(tiers: TwoTiers, tokens: list[int]) -> Seq:
    """A preempted sequence of `tokens`, whose blocks have been copied out and have left the device."""
    seq = tiers.serve(tokens)
    assert tiers.preempt(seq)
    tiers.copy()
    tiers.cache.tree.evict(len(tokens))
    tiers.look()
    return seq
