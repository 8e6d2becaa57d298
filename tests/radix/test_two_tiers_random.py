"""Random lives of a cache with two tiers, on memory that is written as late as the fences allow.

After each move the books are sound and no block has changed its place in a way that the move does not explain. Each
seed is one run: a failing number is all it takes to see it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable

import pytest

from repertory.protocol.ids import StepId
from repertory.radix.node import Node

from .drive import Seq
from .two_tiers import Place, TwoTiers

Where = dict[tuple[Hashable, tuple[int, ...]], Place]


class Run:
    """One random run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick, chance = self.random.choice, self.random.random
        self.size, blocks = pick([1, 2, 4]), pick([4, 8, 16, 30])
        self.tiers = TwoTiers(blocks, pick([1, 3, 8, 30, 60]), self.size, caching=chance() < 0.8)
        if chance() < 0.2:
            self.tiers.cache.tree.key = lambda first: 0  # type: ignore[method-assign]
        self.most_tokens = max(1, blocks * self.size // 2)
        self.stems = [self._tokens(self.most_tokens) for _ in range(2)]
        self.num_turns = pick([30, 100])
        failing = pick([0.0, 0.15])
        self.tiers.failing = lambda job: chance() < failing
        self.speed = pick([0.2, 0.6, 0.95])
        self.planned: list[Seq] = []
        self.unproven: dict[int, list[Seq]] = {}

    def go(self) -> None:
        for _ in range(self.num_turns):
            for _ in range(self.random.randint(1, 5)):
                self._move()
            self._send()
            for _ in range(self.random.randint(0, 6)):
                if self.random.random() < self.speed:
                    self._run(self.random.choice(["step", "out", "in"]))
        self.tiers.check_nothing_is_left()

    # ---- moves ----------------------------------------------------------------------------------

    def _move(self) -> None:
        moves: list[Callable[[], None]] = [self._open, self._admit, self._admit, self._fetch_ahead, self._chunk, self._chunk]
        moves += [self._chunk, self._preempt, self._close, self._rarely]
        before, pinned = self.tiers.where(), self._pinned()
        move = self.random.choice(moves)
        move()
        self._check_places(before)
        if move not in (self._preempt, self._rarely, self._fetch_ahead):
            self._check_pins(before, pinned)

    def _open(self) -> None:
        if len(self.tiers.seqs) < 8:
            length = self.random.randint(1, self.most_tokens)
            shared = self.random.choice(self.stems)[: self.random.randint(0, length)]
            self.tiers.open([*shared, *self._tokens(length - len(shared))], self.random.choice([None, None, None, "salt"]))

    def _admit(self) -> None:
        for seq in self._some(lambda seq: seq.holding.node is None):
            found = self.tiers.admit(seq, spare=self.random.choice([0, 0, 1]), fetch=self.random.random() < 0.8)
            assert found is None or found < len(seq.log)

    def _fetch_ahead(self) -> None:
        for seq in self._some(lambda seq: seq.holding.node is None):
            self.tiers.cache.fetch_ahead(seq.holding, seq.log, spare=0, may_fetch=lambda start, count: True)
            self.tiers.look()

    def _chunk(self) -> None:
        for seq in self._some(self._may_run):
            left = len(seq.log) - seq.num_computed
            before = len(self.tiers.step.rows)
            # What is found meanwhile shortens a chunk: never beyond the end of the log.
            self._chunk_of(seq, left if self.random.random() < 0.6 else self.random.randint(1, left))
            if len(self.tiers.step.rows) > before:
                self.planned.append(seq)

    def _chunk_of(self, seq: Seq, count: int) -> None:
        advance = self.tiers.cache.advance(seq.holding, seq.log, seq.num_computed)
        self.tiers.look()
        seq.num_computed = advance.num_computed
        if advance.copy is not None:
            self.tiers.step.copies.append(advance.copy)
        if not advance.must_wait:
            self.tiers.compute(seq, min(count, len(seq.log) - seq.num_computed))

    def _preempt(self) -> None:
        for seq in self._some(self._may_go):
            if self.random.random() < 0.7:
                behind = [other for other in self.tiers.seqs.values() if other.holding.seq_id > seq.holding.seq_id]
                self.tiers.preempt(seq, [other for other in reversed(behind) if other.holding.node is None])
            else:
                self.tiers.release(seq)

    def _close(self) -> None:
        if self.random.random() < 0.3:
            for seq in self._some(lambda seq: seq not in self.planned):
                self.tiers.close(seq)

    def _rarely(self) -> None:
        """A reset, or logits that are not finite: of a row whose step is in flight, whatever became of it since."""
        if self.random.random() < 0.2:
            self.tiers.cache.reset()
        elif self.random.random() < 0.3 and not self.planned:
            for seq in self._some(lambda seq: any(seq in rows for rows in self.unproven.values())):
                for victim in self.tiers.cache.fail(seq.holding, seq.log):
                    self.tiers.seqs[victim.seq_id].num_computed = 0
                self.tiers.look()
                self.tiers.close(seq)
        self.tiers.look()

    def _send(self) -> None:
        self.unproven[self.tiers.step.step_id] = self.planned
        self.planned = []
        self.tiers.begin()
        if self.random.random() < 0.5:
            self.tiers.cache.write_back(self.random.randint(1, 8))
            self.tiers.look()
            self.tiers.send()

    def _run(self, lane: str) -> None:
        before = self.tiers.where()
        num_failed = len(self.tiers.lost)
        ran = self.tiers.run(lane)
        if lane == "step" and ran:
            step_id = self.tiers.completed["step"]
            for seq in self.unproven.pop(step_id):
                if seq.holding.node is not None and seq.num_computed == len(seq.log):
                    self.tiers.cache.prove(seq.holding, StepId(step_id))
                    if len(seq.log) < self.most_tokens:
                        seq.log.append(self.random.randrange(3))
        if lane == "step":
            assert self.tiers.where() == before
        else:
            self._check_arrivals(before, lane)
        assert num_failed == len(self.tiers.lost) or lane == "in"

    # ---- promises -------------------------------------------------------------------------------

    def _pinned(self) -> dict[int, list[int]]:
        """Blocks on the host that each preempted sequence keeps."""
        found: dict[int, list[int]] = {}
        host = self.tiers.cache.host
        assert host is not None
        for seq_id, node in host.pinned().items():
            blocks: list[int] = []
            step: Node | None = node
            while step is not None:
                blocks += step.host_blocks
                step = step.parent
            found[int(seq_id)] = blocks
        return found

    def _check_places(self, before: Where) -> None:
        after = self.tiers.where()
        for prefix, place in after.items():
            was = before.get(prefix, frozenset())
            # Only the end of a copy makes its content readable; only a chunk makes content on the device.
            assert not ("device" in place and "in" in was), f"{prefix} arrived without the end of a copy"
            assert not ("host" in place and "host" not in was), f"{prefix} is on the host without the end of a copy"
            assert "in" not in place or "host" in place, f"{prefix} comes from nowhere"

    def _check_pins(self, before: Where, pinned: dict[int, list[int]]) -> None:
        """What a preempted sequence keeps on the host stays there, until it is back or what it hangs on is gone."""
        after, kept = self.tiers.where(), self._pinned()
        has_orphans = any("device" in place and prefix not in after for prefix, place in before.items())
        for seq_id, blocks in pinned.items():
            assert seq_id not in kept or set(blocks) <= set(kept[seq_id]) or has_orphans

    def _check_arrivals(self, before: Where, lane: str) -> None:
        after = self.tiers.where()
        arriving, arrived = ("in", "device") if lane == "in" else ("out", "host")
        for prefix, place in after.items():
            was = before[prefix]
            allowed = {was, (was - {arriving}) | {arrived}, was - {arriving}}
            assert place in allowed, f"{prefix} was {sorted(was)} and is {sorted(place)} after a copy {lane}"

    # ---- pieces ---------------------------------------------------------------------------------

    def _may_run(self, seq: Seq) -> bool:
        return self._may_go(seq) and not seq.holding.jobs and seq.num_computed < len(seq.log)

    def _may_go(self, seq: Seq) -> bool:
        return seq.holding.node is not None and seq not in self.planned

    def _some(self, condition: Callable[[Seq], bool]) -> list[Seq]:
        """One sequence of which `condition` holds, if there is any."""
        found = [seq for seq in self.tiers.seqs.values() if condition(seq)]
        return [self.random.choice(found)] if found else []

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(3) for _ in range(count)]


@pytest.mark.parametrize("seed", range(150))
def test_both_tiers_hold_what_the_tree_says(seed: int) -> None:
    Run(seed).go()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 6000, 100))
def test_both_tiers_hold_what_the_tree_says_in_many_runs(first: int) -> None:
    for seed in range(first, first + 100):
        try:
            Run(seed).go()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
