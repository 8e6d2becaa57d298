"""The largest step that a device may be given, run before there is anything to compute: what it takes is measured."""

from __future__ import annotations

import numpy as np

from ...protocol.ids import BlockId, SequenceId
from ...protocol.messages import NewRow
from ...protocol.sampling import SamplingParams
from ..answers import draws_of
from ..sampling import sample
from ..slots import Row, Slot
from .plan import GpuPlan, PoolShape, make_plan
from .runtime import Runtime
from .stepping import StepRunner

PROFILE_BLOCKS = 2
"""Of the pool that it runs on: every row's table leads through the same ones, again and again."""


def run_largest_step(runner: StepRunner, runtime: Runtime, shape: PoolShape) -> None:
    """Run a step of as many tokens and as many draws as there may be. Leaves junk in the pool's first blocks."""
    limits = runner.limits
    num_rows = min(limits.num_rows, limits.num_tokens)
    left = limits.num_tokens
    rows = []
    for index in range(num_rows):
        length = min(limits.table_width * shape.block_size, left - (num_rows - index - 1))
        rows.append(_row(index, length, shape))
        left -= length
    _run(runner, runtime, make_plan(rows, [], shape, {}))


def _row(index: int, num_tokens: int, shape: PoolShape) -> Row:
    table = [BlockId(block % PROFILE_BLOCKS) for block in range(-(-num_tokens // shape.block_size))]
    tokens = np.random.default_rng(index).integers(shape.vocab_size, size=num_tokens).tolist()
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, repetition_penalty=1.1, seed=index)
    slot = Slot(NewRow(SequenceId(index + 1), tokens, num_tokens, params, table))
    return Row(slot, 0, num_tokens, 1)


def _run(runner: StepRunner, runtime: Runtime, plan: GpuPlan) -> None:
    draws = draws_of(plan.sampling)
    staged = runner.stage(0, plan, draws, [])
    inputs = runner.inputs(plan)

    def work() -> None:
        runner.launch_inputs(staged)
        hidden = runner.launch_hidden(staged.num_tokens, inputs)
        logits = runner.launch_logits(hidden, staged.num_samples)
        runner.launch_draws(logits)
        sample(logits.float(), draws)  # as where the host has a say in all of them
        runner.launch_outcome(staged)

    runtime.compute.launch(work)
    runtime.compute.record().synchronize()
