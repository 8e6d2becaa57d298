"""Whatever arrives, fails, leaves or runs short: every request gives what it gives alone, once, and it ends.

Each seed is one run: sizes, settings, requests and the order of events are drawn from it, so a failing
number is all it takes to see it again.
"""

from __future__ import annotations

import random

import pytest

from repertory.protocol.ids import RequestId
from repertory.protocol.messages import RunStep

from .world import World

STOP_ID = 7
VOCABULARY = 50
MOST_IDLE_TURNS = 200


class Run:
    """One random run, from the first arrival to the last end."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = self._world()
        self.pool_tokens = self.world.core.capacity.num_device_blocks * self.world.config.block_size
        self.stems = [self._tokens(self.pool_tokens) for _ in range(3)]
        self.num_to_come = self.random.randint(1, 25)
        self.failing = self.random.random() < 0.3
        self.resetting = self.random.random() < 0.3
        self.copy_chance = self.random.choice([0.1, 0.5, 0.9])
        if self.random.random() < 0.3:
            self.world.failing_copies = lambda copy: self.random.random() < 0.2
        self.aborted: set[RequestId] = set()

    def _world(self) -> World:
        pick, chance = self.random.choice, self.random.random
        block_size, blocks = pick([1, 2, 4, 8]), pick([3, 12, 12, 20, 40, 200])
        world = World(
            blocks=blocks,
            block_size=block_size,
            vocab_size=VOCABULARY,
            max_model_len=pick([blocks * block_size, blocks * block_size // 2 + 2, 10**6]),
            paced=pick([False, False, True]),
            max_steps_in_flight=pick([1, 2, 2]),
            max_num_batched_tokens=pick([1, 2, 7, 16, 64, 512]),
            max_num_seqs=pick([1, 2, 4, 16]),
            max_num_queued=pick([2, 1000, 1000]),
            enable_chunked_prefill=chance() < 0.7,
            enable_prefix_caching=chance() < 0.8,
            max_prefill_batch_size=pick([None, None, 1, 2]),
            scheduling_policy=pick(["fcfs", "static", "priority", "longest-prefix", "fair-share"]),
            scheduling_delay_s=pick([0.0, 0.0, 0.035]),
            scheduling_delay_factor=pick([0.0, 0.0, 2.5]),
            host_blocks=pick([0, 0, 1, 3, 12, 60, 400]),
            preemption_mode=pick(["auto", "swap", "swap", "heuristic", "recompute"]),
        )
        if chance() < 0.6:
            world.without_reserve()
        return world

    def go(self) -> None:
        """Turn until everything has ended, then look at all of it."""
        world, idle = self.world, 0
        while self.num_to_come or world.in_flight or world.core.num_live:
            moved = self._turn()
            idle = 0 if moved else idle + 1
            assert idle < MOST_IDLE_TURNS, f"nothing moves: {world.core.stats()}"
        self._check()

    def _turn(self) -> bool:
        world, chance = self.world, self.random.random
        came = self.num_to_come > 0 and chance() < 0.5
        if came:
            self._submit()
        self._disturb()
        step: RunStep | None = world.plan()
        runs = bool(world.in_flight) and (step is None or chance() < 0.5)
        if runs:
            world.finish()
        elif step is None:
            world.now += world.step_s
        copied = chance() < self.copy_chance and world.copy(self.random.choice(["out", "in"]))
        return came or runs or copied or step is not None

    def _submit(self) -> None:
        self.num_to_come -= 1
        world, chance = self.world, self.random.random
        world.submit(
            self._prompt(),
            max_tokens=None if chance() < 0.03 else self.random.randint(1, 30),
            n=self.random.choice([1, 1, 1, 2, 4]),
            seed=self.random.randrange(100) if chance() < 0.5 else None,
            prompt_logprobs=self.random.choice([None, None, None, 0, 2]),
            stop_token_ids=[STOP_ID] if chance() < 0.3 else [],
            cache_salt=self.random.choice([None, None, None, "a", "b"]),
            priority=self.random.choice([0, 0, 1, 5, -3]),
            tenant=self.random.choice([None, "a", "b"]),
        )

    def _prompt(self) -> list[int]:
        """A stem's beginning with an end of its own; or an earlier prompt again, perhaps with what it gave and more."""
        earlier = list(self.world.admits)
        if earlier and self.random.random() < 0.35:
            request = self.random.choice(earlier)
            prompt = list(self.world.admits[request].token_ids)
            if self.random.random() < 0.6:
                prompt += self.world.tokens.get(request, []) + self._tokens(self.random.randint(0, 3))
            return prompt
        length = self.random.randint(1, max(1, min(self.pool_tokens, 60)))
        shared = self.random.choice(self.stems)[: self.random.randint(0, length)]
        return shared + self._tokens(length - len(shared))

    def _disturb(self) -> None:
        world, chance = self.world, self.random.random
        if chance() < 0.02 and world.admits:
            request = self.random.choice(list(world.admits))
            world.abort(request)
            self.aborted.add(request)
        if chance() < 0.03 and world.running():
            request = self.random.choice(world.running())
            world.stop(request, self.random.randrange(world.admits[request].params.n))
        if self.failing and chance() < 0.03 and world.running():
            world.poisoned.add(self.random.choice(world.running()))
        if self.resetting and chance() < 0.02:
            world.reset()

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def _check(self) -> None:
        world = self.world
        world.check_outputs()
        for request in world.admits:
            reason = world.reason(request)
            assert reason != "abort" or request in self.aborted
            assert reason != "error" or request in world.poisoned
        self._check_numbers()
        world.check_nothing_is_left()

    def _check_numbers(self) -> None:
        world, stats = self.world, self.world.core.stats()
        lengths = [len(world.admits[request].token_ids) + len(tokens) for (request, _), tokens in world.given.items()]
        lengths += [len(admit.token_ids) for admit in world.admits.values() for _ in range(admit.params.n)]
        longest = -(-max(lengths) // world.config.block_size)
        # A failure sets others back, and they ask again.
        num_set_back = len(world.poisoned) * sum(admit.params.n for admit in world.admits.values())
        assert sum(stats.num_preemptions.values()) <= len(lengths) * longest + num_set_back
        assert (
            0 <= stats.prefix_cache_hits <= stats.prefix_cache_queries <= sum(len(a.token_ids) for a in world.admits.values())
        )
        assert stats.num_computed_tokens == world.device.num_computed_tokens
        assert stats.num_steps == sum(bool(step.seq_ids) for step in world.steps)
        if not world.config.enable_prefix_caching:
            assert stats.prefix_cache_hits == 0


@pytest.mark.parametrize("seed", range(150))
def test_every_request_gives_what_it_gives_alone_and_ends_once(seed: int) -> None:
    Run(seed).go()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 4000, 100))
def test_every_request_gives_what_it_gives_alone_and_ends_once_in_many_runs(first: int) -> None:
    for seed in range(first, first + 100):
        try:
            Run(seed).go()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
