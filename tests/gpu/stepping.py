"""Drives an executor without a scheduler: every sequence gets scattered blocks of its own, tests say what each step runs."""

from __future__ import annotations

import random
from collections.abc import Sequence

from repertory.gpu.executor import Executor
from repertory.protocol.ids import BlockId, Epoch, SequenceId, StepId
from repertory.protocol.messages import BlockCopy, Fences, NewRow, RunStep, StepDone
from repertory.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, seed=0)


class Stepper:
    """Keeps what a scheduler would: how far each sequence is computed, and which blocks are free."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.free = [BlockId(i) for i in range(executor.capacity.num_device_blocks)]
        random.Random(7).shuffle(self.free)
        self.logs: dict[int, list[int]] = {}
        self.tables: dict[int, list[BlockId]] = {}
        self.computed: dict[int, int] = {}
        self._admitted: list[NewRow] = []
        self._released: list[SequenceId] = []
        self._steps = 0

    def add(
        self,
        seq_id: int,
        tokens: Sequence[int],
        *,
        room: int = 64,
        params: SamplingParams = GREEDY,
        num_prompt_tokens: int | None = None,
        computed: int = 0,
        shared: Sequence[BlockId] = (),
        index: int = 0,
    ) -> None:
        """Admit a sequence with the next step. `shared` are leading blocks that exist, `computed` the tokens in them."""
        size = self.executor.capacity.block_size
        needed = -(-(len(tokens) + room) // size) - len(shared)
        self.tables[seq_id] = [*shared, *(self.free.pop() for _ in range(needed))]
        self.logs[seq_id] = list(tokens)
        self.computed[seq_id] = computed
        num_prompt = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
        self._admitted.append(
            NewRow(SequenceId(seq_id), list(tokens), num_prompt, params, list(self.tables[seq_id]), index=index)
        )

    def release(self, seq_id: int) -> None:
        """Let a sequence go with the next step."""
        self._released.append(SequenceId(seq_id))
        self.free += self.tables.pop(seq_id)
        del self.logs[seq_id], self.computed[seq_id]

    def step(self, counts: dict[int, int], *, copies: Sequence[BlockCopy] = ()) -> StepDone:
        """Run `counts[seq_id]` tokens of each sequence; the one that reaches its log's end samples."""
        starts = [self.computed[seq_id] for seq_id in counts]
        ends = [start + count for start, count in zip(starts, counts.values(), strict=True)]
        self._steps += 1
        done = self.executor.run_step(
            RunStep(
                epoch=Epoch(1),
                step_id=StepId(self._steps),
                after=Fences(),
                seq_ids=[SequenceId(seq_id) for seq_id in counts],
                starts=starts,
                num_tokens=list(counts.values()),
                samples=[int(end == len(self.logs[seq_id])) for seq_id, end in zip(counts, ends, strict=True)],
                admitted=self._admitted,
                released=self._released,
                copies=list(copies),
            )
        )
        self._admitted, self._released = [], []
        self.computed.update(zip(counts, ends, strict=True))
        for seq_id, token in zip(done.seq_ids, done.token_ids, strict=True):
            self.logs[seq_id].append(token)
        for row in done.failed:
            self.logs[row.seq_id].append(0)
        return done

    def run(self, num_tokens: int, *, chunk: int = 10**9) -> dict[int, list[int]]:
        """Go on until every sequence has grown by `num_tokens`, decodes and chunks mixed. Returns the new tokens."""
        begin = {seq_id: len(log) for seq_id, log in self.logs.items()}
        while active := [seq_id for seq_id in begin if len(self.logs[seq_id]) < begin[seq_id] + num_tokens]:
            self.step({seq_id: min(chunk, len(self.logs[seq_id]) - self.computed[seq_id]) for seq_id in active})
        return {seq_id: self.logs[seq_id][begin[seq_id] :] for seq_id in begin}
