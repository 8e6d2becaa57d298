"""Steps of random tokens, one at a time, before there is anything to compute: to measure what they take or what they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from ...protocol.ids import BlockId, SequenceId
from ...protocol.messages import NewRow
from ...protocol.sampling import SamplingParams
from ..sampling import SamplingRow
from ..slots import Slot
from .plan import GpuPlan, PoolShape
from .runtime import Runtime
from .stepping import StepRunner


def random_slot(seed: int, num_tokens: int, shape: PoolShape, params: SamplingParams) -> Slot:
    """A prompt of random tokens, the same for the same `seed`. Its table leads through the pool, as often as it takes."""
    tokens = np.random.default_rng(seed).integers(shape.vocab_size, size=num_tokens).tolist()
    table = [BlockId(block % shape.num_blocks) for block in range(-(-num_tokens // shape.block_size))]
    return Slot(NewRow(SequenceId(seed + 1), tokens, num_tokens, params, table))


def run_alone(
    runner: StepRunner,
    runtime: Runtime,
    plan: GpuPlan,
    *,
    draws: Sequence[SamplingRow] = (),
    then: Callable[[Tensor], object] = lambda hidden: None,
) -> None:
    """Run the model over a step, then `then` with its hidden states [tokens, hidden_size], and wait for all of it."""
    staged = runner.stage(0, plan, draws, [])
    inputs = runner.inputs(plan)

    def work() -> None:
        runner.launch_inputs(staged)
        then(runner.launch_hidden(staged.num_tokens, inputs))
        runner.launch_outcome(staged)

    runtime.compute.launch(work)
    runtime.compute.record().synchronize()
