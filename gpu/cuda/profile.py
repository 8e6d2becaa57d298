"""The largest step that a device may be given, run before there is anything to compute: what it takes is measured."""

from __future__ import annotations

from torch import Tensor

from ...protocol.sampling import SamplingParams
from ..answers import draws_of
from ..sampling import sample
from ..slots import Row
from .lone_steps import random_slot, run_alone
from .plan import PoolShape, make_plan
from .runtime import Runtime
from .stepping import StepRunner

PROFILE_BLOCKS = 2
"""Of the pool that it runs on: every row's table leads through the same ones, again and again."""


def run_largest_step(runner: StepRunner, runtime: Runtime, shape: PoolShape) -> None:
    """Run a step of as many tokens and as many draws as there may be. Leaves junk in the pool's first blocks."""
    plan = make_plan(_largest_rows(runner, shape), [], shape, {})
    draws = draws_of(plan.sampling)

    def draw(hidden: Tensor) -> None:
        logits = runner.launch_logits(hidden, len(draws))
        runner.launch_draws(logits)
        sample(logits.float(), draws)  # as where the host has a say in all of them

    run_alone(runner, runtime, plan, draws=draws, then=draw)


def _largest_rows(runner: StepRunner, shape: PoolShape) -> list[Row]:
    """As many rows as there may be, the first ones as long as they may be with a token left for each other."""
    limits = runner.limits
    num_rows = min(limits.num_rows, limits.num_tokens)
    left = limits.num_tokens
    rows = []
    for index in range(num_rows):
        length = min(limits.table_width * shape.block_size, left - (num_rows - index - 1))
        params = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, repetition_penalty=1.1, seed=index)
        rows.append(Row(random_slot(index, length, shape, params), 0, length, 1))
        left -= length
    return rows
