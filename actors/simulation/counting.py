"""A device that only counts: it answers what a workload says, and checks nothing.

The simulated device of `gpu/simulated` remembers what every slot of its memory holds, and that is nearly all of what a
run on it costs. To compare policies the scheduler's memory is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...gpu.executor import Watch
from ...protocol.capacity import Capacity
from ...protocol.ids import SequenceId
from ...protocol.messages import CopyBlocks, CopyDone, RunStep, StepDone
from .workload import Job, output_token


class CountingExecutor:
    """Implements `Executor` for the `admits` of `jobs`: a sequence's seed says which job it is."""

    def __init__(self, capacity: Capacity, jobs: Sequence[Job]) -> None:
        self.capacity = capacity
        self.watch: Watch | None = None
        self._jobs = jobs
        self._sequences: dict[SequenceId, list[int]] = {}  # seed, index, tokens of output so far

    @property
    def num_sequences(self) -> int:
        """Sequences it was told of and not told to forget."""
        return len(self._sequences)

    def run_step(self, step: RunStep) -> StepDone:
        """The next token of each row that samples; no time passes."""
        sequences, jobs = self._sequences, self._jobs
        for seq_id in step.released:
            sequences.pop(seq_id, None)
        for row in step.admitted:
            assert row.params.seed is not None, "not an admission of a workload"
            sequences[row.seq_id] = [row.params.seed, row.index, len(row.token_ids) - row.num_prompt_tokens]
        seq_ids, token_ids = [], []
        for seq_id, samples in zip(step.seq_ids, step.samples, strict=True):
            if samples:
                state = sequences[seq_id]
                seq_ids.append(seq_id)
                token_ids.append(output_token(jobs, state[0], state[1], state[2]))
                state[2] += 1
        return StepDone(step.epoch, step.step_id, seq_ids, token_ids, 0.0, num_sequences=len(sequences))

    def copy_blocks(self, copy: CopyBlocks) -> CopyDone:
        """Every copy goes well."""
        num_bytes = len(copy.sources) * self.capacity.block_bytes
        return CopyDone(copy.epoch, copy.copy_id, copy.direction, num_bytes, 0.0)

    def interrupt(self) -> None:
        """Nothing ever waits."""

    def close(self) -> None:
        """Forget everything."""
        self._sequences.clear()
