"""A device that only counts: it answers what a workload says, and checks nothing.

The simulated device of `gpu/simulated` remembers what every slot of its memory holds, and that is nearly all of what a
run on it costs. To compare policies the scheduler's memory is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...gpu.executor import Watch
from ...protocol.capacity import Capacity
from ...protocol.ids import SequenceId
from ...protocol.messages import CopyBlocks, CopyDone, RunStep, StepDone
from .prompt_parts import prompt_parts
from .workload import Job, output_tokens


class CountingExecutor:
    """Implements `Executor` for the `admits` of `jobs`: a sequence's seed says which job it is."""

    def __init__(self, capacity: Capacity, jobs: Sequence[Job]) -> None:
        self.capacity = capacity
        self.watch: Watch | None = None
        self._jobs = jobs
        self._sequences: dict[SequenceId, Iterator[int]] = {}  # the tokens that are still to come
        self._asking: dict[SequenceId, int] = {}  # the lengths of prompts that are asked about

    @property
    def num_sequences(self) -> int:
        """Sequences it was told of and not told to forget."""
        return len(self._sequences)

    def run_step(self, step: RunStep) -> StepDone:
        """The next token of each row that samples; no time passes."""
        sequences = self._sequences
        for seq_id in step.released:
            sequences.pop(seq_id, None)
            self._asking.pop(seq_id, None)
        for row in step.admitted:
            seed, place = row.params.seed, len(row.token_ids) - row.num_prompt_tokens
            assert seed is not None, "not an admission of a workload"
            sequences[row.seq_id] = output_tokens(self._jobs[seed - 1], seed, row.index, place)
            if row.params.prompt_logprobs is not None and row.index == 0:
                self._asking[row.seq_id] = row.num_prompt_tokens
        seq_ids = [seq_id for seq_id, samples in zip(step.seq_ids, step.samples, strict=True) if samples]
        token_ids = [next(sequences[seq_id], 0) for seq_id in seq_ids]  # 0: surplus, after its end
        prompts = list(prompt_parts(step, lambda seq_id: self._asking.get(seq_id, 0))) if self._asking else []
        return StepDone(step.epoch, step.step_id, seq_ids, token_ids, 0.0, num_sequences=len(sequences), prompts=prompts)

    def copy_blocks(self, copy: CopyBlocks) -> CopyDone:
        """Every copy goes well."""
        num_bytes = len(copy.sources) * self.capacity.block_bytes
        return CopyDone(copy.epoch, copy.copy_id, copy.direction, num_bytes, 0.0)

    def interrupt(self) -> None:
        """Nothing ever waits."""

    def close(self) -> None:
        """Forget everything."""
        self._sequences.clear()
