"""The logits of every token of some prompts, as an opened GPU executor computes them through its pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repertory.gpu.cuda.executor import GpuExecutor
from repertory.gpu.cuda.plan import GpuPlan, PoolShape, make_plan
from repertory.gpu.slots import Row, Slot
from repertory.protocol.ids import BlockId, SequenceId
from repertory.protocol.messages import NewRow
from repertory.protocol.sampling import SamplingParams
from repertory.tests.gpu_cuda.lazy_runtime import LazyRuntime
from repertory.tests.gpu_cuda.opened import open_late


def all_logits(model_dir: Path, prompts: Sequence[list[int]], *, chunk: int = 48, **settings: Any) -> Tensor:
    """float32 [tokens of all prompts, vocab_size]. The prompts go side by side, `chunk` tokens of each in a step."""
    executor, runtime = open_late(model_dir, **settings)
    free = iter(range(executor.capacity.num_device_blocks))
    size = executor.capacity.block_size
    slots = [
        Slot(NewRow(SequenceId(i), prompt, len(prompt), SamplingParams(), [BlockId(next(free)) for _ in prompt[::size]]))
        for i, prompt in enumerate(prompts)
    ]
    found: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        rows = [Row(slot, start, min(start + chunk, len(slot.token_ids)), 0) for slot in slots if start < len(slot.token_ids)]
        capacity = executor.capacity
        plan = make_plan(rows, [], PoolShape(capacity.num_device_blocks, size, capacity.vocab_size), {})
        parts = _run(executor, runtime, plan).split([row.end - row.start for row in plan.rows])
        for row, logits in zip(plan.rows, parts, strict=True):
            found[row.slot.seq_id].append(logits)
    executor.close()
    return torch.cat([torch.cat(parts) for parts in found])


def _run(executor: GpuExecutor, runtime: LazyRuntime, plan: GpuPlan) -> Tensor:
    runner = executor._open.runner
    staged = runner.stage(0, plan, [], [])
    inputs = runner.inputs(plan)
    found: list[Tensor] = []

    def work() -> None:
        runner.launch_inputs(staged)
        found.append(runner.launch_head(runner.launch_hidden(staged.num_tokens, inputs)).float())

    runtime.compute.launch(work)
    runtime.compute.record().synchronize()
    return found[0]
