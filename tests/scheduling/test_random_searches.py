"""Random beam searches beside random requests, on little memory: every row reads what it should, and nothing is left."""

from __future__ import annotations

import random

import pytest

from repertory.protocol.ids import RequestId

from .lossy import LossyWorld

VOCABULARY = 50
MOST_IDLE_TURNS = 400


class Search:
    """Rounds of requests that hold and follow, as a beam search sends them; which beams go on is drawn."""

    def __init__(self, draw: random.Random, pool_tokens: int) -> None:
        self.draw = draw
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, max(1, min(40, pool_tokens // 3))))]
        self.beams: list[tuple[RequestId | None, list[int]]] = [(None, prompt)]
        self.asked: list[tuple[RequestId, list[int]]] = []
        self.parents: list[RequestId] = []
        self.width = draw.choice([1, 2, 4])
        self.num_rounds = draw.randint(1, max(1, min(20, pool_tokens // 3)))

    def turn(self, world: LossyWorld) -> bool:
        """Ask, or take the answers in; whether it did either."""
        if self.num_rounds == 0 or self.draw.random() < 0.3:
            return False
        if not self.asked:
            self.asked = [
                (world.submit(tokens, max_tokens=1, holds=True, follows=parent), tokens) for parent, tokens in self.beams
            ]
        elif all(request in world.tokens for request, _ in self.asked):
            self._take(world)
        else:
            return False
        return True

    def _take(self, world: LossyWorld) -> None:
        before, self.parents = self.parents, [request for request, _ in self.asked]
        self.num_rounds = 0 if self.draw.random() < 0.03 else self.num_rounds - 1
        for request in before if self.num_rounds else [*before, *self.parents]:
            world.abort(request)
        chosen = self.draw.choices(self.asked, k=self.width)
        self.beams = [
            (request, [*tokens, self.draw.choice([world.tokens[request][0], self.draw.randrange(VOCABULARY)])])
            for request, tokens in chosen
        ]
        self.asked = []


class Run:
    """One random run, from the first round to the last end."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.world = self._world()
        pool_tokens = self.world.core.capacity.num_device_blocks * self.world.config.block_size
        self.most_tokens = max(1, min(40, pool_tokens // 2))
        self.searches = [Search(self.draw, pool_tokens) for _ in range(self.draw.randint(1, 6))]
        self.num_to_come = 15

    def _world(self) -> LossyWorld:
        pick = self.draw.choice
        world = LossyWorld(
            blocks=pick([12, 16, 26, 45]),
            block_size=pick([1, 2, 4, 8]),
            vocab_size=VOCABULARY,
            host_blocks=pick([0, 0, 5, 20, 100]),
            max_steps_in_flight=pick([1, 2, 2]),
            max_num_batched_tokens=pick([1, 3, 7, 16, 64, 512]),
            max_num_seqs=pick([1, 2, 4, 16, 64]),
            enable_chunked_prefill=pick([True, True, True, False]),
        )
        if pick([True, False]):
            world.without_reserve()
        return world

    def go(self) -> None:
        """Turn until everything has ended."""
        world, idle = self.world, 0
        while any(search.num_rounds for search in self.searches) or world.core.num_live or world.in_flight:
            idle = 0 if self._turn() else idle + 1
            assert idle < MOST_IDLE_TURNS, f"nothing moves: {world.core.stats()}"
        world.check_outputs()
        world.check_nothing_is_left()

    def _turn(self) -> bool:
        world, chance = self.world, self.draw.random
        moved = sum(search.turn(world) for search in self.searches) > 0
        if self.num_to_come and chance() < 0.1:
            self.num_to_come -= 1
            prompt = [self.draw.randrange(VOCABULARY) for _ in range(self.draw.randint(1, self.most_tokens))]
            world.submit(
                prompt, max_tokens=self.draw.randint(1, 12), n=self.draw.choice([1, 1, 3]), seed=self.draw.randrange(9)
            )
            moved = True
        if chance() < 0.4:
            moved = world.copy(self.draw.choice(["out", "in"])) or moved
        step = world.plan()
        if world.in_flight and (step is None or chance() < 0.5):
            world.finish()
            return True
        if step is None:
            moved = world.copy() or moved
            world.now += world.step_s
        return moved or step is not None


@pytest.mark.parametrize("seed", range(60))
def test_every_beam_reads_what_it_should_and_nothing_is_left(seed: int) -> None:
    Run(seed).go()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_every_beam_reads_what_it_should_in_many_runs(first: int) -> None:
    for seed in range(first, first + 100):
        try:
            Run(seed).go()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
