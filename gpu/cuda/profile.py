"""The largest step that a device may be given, run before there is anything to compute: what it takes is measured."""

from __future__ import annotations

import numpy as np

from ...protocol.ids import BlockId, SequenceId
from ...protocol.messages import NewRow
from ...protocol.sampling import SamplingParams
from ..answers import draws_of
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
    longest = min(limits.num_tokens - num_rows + 1, limits.table_width * shape.block_size)
    _run(runner, runtime, make_plan([_row(i, 1 if i else longest, shape) for i in range(num_rows)], [], shape, {}))


def _row(index: int, num_tokens: int, shape: PoolShape) -> Row:
    table = [BlockId(block % PROFILE_BLOCKS) for block in range(-(-num_tokens // shape.block_size))]
    tokens = np.random.default_rng(index).integers(shape.vocab_size, size=num_tokens).tolist()
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=index)
    slot = Slot(NewRow(SequenceId(index + 1), tokens, num_tokens, params, table))
    return Row(slot, 0, num_tokens, 1)


def _run(runner: StepRunner, runtime: Runtime, plan: GpuPlan) -> None:
    staged = runner.stage(0, plan, draws_of(plan.sampling), [])
    inputs = runner.inputs(plan)

    def work() -> None:
        runner.launch_inputs(staged)
        hidden = runner.launch_hidden(staged.num_tokens, inputs)
        logits = runner.launch_logits(hidden, staged.num_samples)
        logits.float()  # what a draw that the host has a say in is made from
        runner.launch_draws(logits)
        runner.launch_outcome(staged)

    runtime.compute.launch(work)
    runtime.compute.record().synchronize()
