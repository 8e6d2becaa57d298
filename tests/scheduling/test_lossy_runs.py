"""Random runs on devices that die, with killers among the requests and readers of every pace.

Each seed is one run: a failing number is all it takes to see it again. A death by chance while a suspect is alone is left
out: nobody could tell it from the suspect's own doing.
"""

from __future__ import annotations

import random

import pytest

from repertory.protocol.ids import RequestId

from .lossy import LossyWorld


class LossyRun:
    """One random run: sizes, requests, killers, slow readers and the moments of all deaths are drawn from its seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick, chance = self.random.choice, self.random.random
        self.blocks, self.block_size = pick([12, 12, 20, 200]), pick([1, 2, 4, 8])
        self.world = LossyWorld(
            blocks=self.blocks,
            block_size=self.block_size,
            vocab_size=50,
            paced=pick([False, True]),
            credit_window=pick([1, 3, 1024]),
            max_steps_in_flight=pick([1, 2, 2]),
            max_num_batched_tokens=pick([1, 2, 7, 64]),
            max_num_seqs=pick([1, 2, 4, 16]),
            enable_chunked_prefill=chance() < 0.7,
            enable_prefix_caching=chance() < 0.8,
            max_prefill_batch_size=pick([None, None, 1, 2]),
            scheduling_policy=pick(["fcfs", "static", "priority", "longest-prefix", "fair-share"]),
            scheduling_delay_s=pick([0.0, 0.0, 0.035]),
            host_blocks=pick([0, 0, 3, 12, 60, 400]),
            preemption_mode=pick(["auto", "swap", "swap", "heuristic", "recompute"]),
        )
        self.copy_chance = pick([0.1, 0.5, 0.9])
        if chance() < 0.3:
            self.world.failing_copies = lambda copy: chance() < 0.2
        if chance() < 0.5:
            self.world.without_reserve()
        self.num_to_come = self.random.randint(1, 15)
        self.death_rate = pick([0.0, 0.02, 0.2])
        self.killer_rate = pick([0.0, 0.1, 0.3])
        self.stem = self._tokens(60)
        self.aborted: set[RequestId] = set()

    def go(self) -> None:
        """Turn until everything has ended, then look at all of it."""
        world, idle = self.world, 0
        while self.num_to_come or world.in_flight or world.core.num_live:
            idle = 0 if self._turn() else idle + 1
            assert idle < 300, f"nothing moves: {world.core.stats()}"
        if not world.is_up:
            world.restart()
        world.check_outputs()
        for request in world.admits:
            reason = world.reason(request)
            assert reason != "abort" or request in self.aborted
            assert reason != "error" or request in world.killers
        world.check_nothing_is_left()

    def _turn(self) -> bool:
        world, chance = self.world, self.random.random
        if self.num_to_come and chance() < 0.5:
            self._submit()
        if chance() < 0.01 and world.admits:
            request = self.random.choice(list(world.admits))
            self.aborted.add(request)
            world.abort(request)
        for request in world.tokens:
            if request not in world.ends and chance() < 0.3:
                world.grant(request, self.random.randint(1, 5))
        if not world.is_up:
            if chance() < 0.3:
                world.restart()
            return True
        if chance() < self.death_rate and not self._would_blame_the_innocent():
            world.lose()
            return True
        step = world.plan()
        runs = bool(world.in_flight) and (step is None or chance() < 0.5)
        if runs:
            world.finish()
        elif step is None:
            world.now += world.step_s
        copied = chance() < self.copy_chance and world.copy(self.random.choice(["out", "in"]))
        return runs or copied or step is not None

    def _would_blame_the_innocent(self) -> bool:
        """A death by chance while a suspect is alone looks like its doing: nobody can tell."""
        present = {RequestId(seq_id) for step in self.world.in_flight for seq_id in step.seq_ids}
        return len(present) == 1 and self.world.deaths.get(*present, 0) >= 2 and not present & self.world.killers

    def _submit(self) -> None:
        self.num_to_come -= 1
        chance = self.random.random
        most = self.blocks * self.block_size - 2
        length = self.random.randint(1, max(1, min(most, 40)))
        shared = self.stem[: self.random.randint(0, length)]
        request = self.world.submit(
            shared + self._tokens(length - len(shared)),
            max_tokens=self.random.randint(1, 20),
            seed=self.random.randrange(100) if chance() < 0.5 else None,
            prompt_logprobs=self.random.choice([None, None, None, 0, 2]),
            stop_token_ids=[7] if chance() < 0.3 else [],
            priority=self.random.choice([0, 0, 1, 5, -3]),
            tenant=self.random.choice([None, "a", "b"]),
        )
        if chance() < self.killer_rate:
            self.world.killers.add(request)

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(50) for _ in range(count)]


@pytest.mark.parametrize("seed", range(150))
def test_whatever_dies_every_request_gives_what_it_gives_alone_or_is_failed_for_its_own_deed(seed: int) -> None:
    LossyRun(seed).go()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_whatever_dies_in_many_runs(first: int) -> None:
    for seed in range(first, first + 100):
        try:
            LossyRun(seed).go()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
