"""Drives an executor without a scheduler: sequences with blocks of their own, steps launched one ahead of the answers."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from repertory.gpu.cuda.executor import GpuExecutor, PendingStep
from repertory.protocol.ids import BlockId, Epoch, SequenceId, StepId
from repertory.protocol.messages import Fences, NewRow, RunStep, StepDone
from repertory.protocol.sampling import SamplingParams

EPOCH = Epoch(1)
GREEDY = SamplingParams(temperature=0.0, seed=0)


class Ran(NamedTuple):
    """Steps that ran one behind the other. `ended_s` is when each was answered, by the host's clock."""

    done: list[StepDone]
    began_s: float
    ended_s: list[float]

    @property
    def seconds(self) -> float:
        """From the first launch to the last answer."""
        return self.ended_s[-1] - self.began_s

    @property
    def gaps_s(self) -> list[float]:
        """What each step took of the host's time, the first left out: answer to answer."""
        return [later - earlier for earlier, later in zip(self.ended_s, self.ended_s[1:], strict=False)]


class Driver:
    """Keeps what a scheduler would: how far each sequence is computed, and which blocks are free.

    Takes `num_blocks` of the device's blocks, the first ones, in scattered order.
    """

    def __init__(self, executor: GpuExecutor, *, num_blocks: int | None = None) -> None:
        self.executor = executor
        self.block_size = executor.capacity.block_size
        self._free = [BlockId(block) for block in range(num_blocks or executor.capacity.num_device_blocks)]
        random.Random(0).shuffle(self._free)
        self._computed: dict[SequenceId, int] = {}
        self._length: dict[SequenceId, int] = {}
        self._admitted: list[NewRow] = []
        self._last_id = SequenceId(0)
        self._last_step = StepId(0)

    def admit(
        self,
        token_ids: Sequence[int],
        *,
        room: int = 0,
        params: SamplingParams = GREEDY,
        blocks: Sequence[BlockId] | None = None,
        computed: int = 0,
    ) -> SequenceId:
        """A new sequence, which comes to the device with the next step; it may grow by `room` tokens.

        `blocks` are another's, whose first `computed` tokens are in them.
        """
        if blocks is None:
            blocks = [self._free.pop() for _ in range(-(-(len(token_ids) + room) // self.block_size))]
        self._last_id = SequenceId(self._last_id + 1)
        self._computed[self._last_id], self._length[self._last_id] = computed, len(token_ids)
        self._admitted.append(NewRow(self._last_id, list(token_ids), len(token_ids), params, list(blocks)))
        return self._last_id

    def blocks_for(self, num_tokens: int) -> list[BlockId]:
        """Blocks that sequences may share."""
        return [self._free.pop() for _ in range(-(-num_tokens // self.block_size))]

    def length(self, seq_id: SequenceId) -> int:
        """Tokens of a sequence, drawn ones included."""
        return self._length[seq_id]

    def launch(
        self, counts: Mapping[SequenceId, int], *, after: Fences | None = None, released: Sequence[SequenceId] = ()
    ) -> PendingStep:
        """Launch a step of so many tokens of each sequence; one that reaches its end draws."""
        starts = [self._computed[seq_id] for seq_id in counts]
        ends = [start + count for start, count in zip(starts, counts.values(), strict=True)]
        draws = [int(end == self._length[seq_id]) for seq_id, end in zip(counts, ends, strict=True)]
        self._last_step = StepId(self._last_step + 1)
        pending = self.executor.launch_step(
            RunStep(
                epoch=EPOCH,
                step_id=self._last_step,
                after=after or Fences(),
                seq_ids=list(counts),
                starts=starts,
                num_tokens=list(counts.values()),
                samples=draws,
                admitted=self._admitted,
                released=list(released),
            )
        )
        self._admitted = []
        self._computed.update(zip(counts, ends, strict=True))
        for seq_id, drawn in zip(counts, draws, strict=True):
            self._length[seq_id] += drawn
        return pending

    def ahead(self, num_steps: int, launch: Callable[[int], PendingStep]) -> Ran:
        """Run steps, each launched before the answer of the one before it; `launch` is given their numbers."""
        pending: deque[PendingStep] = deque()
        done: list[StepDone] = []
        ended_s: list[float] = []

        def answer() -> None:
            done.append(pending.popleft().result())
            ended_s.append(time.perf_counter())

        began_s = time.perf_counter()
        for number in range(num_steps):
            pending.append(launch(number))
            if number:
                answer()
        while pending:
            answer()
        return Ran(done, began_s, ended_s)

    def prefill(self, seq_ids: Sequence[SequenceId], *, budget: int) -> Ran:
        """Compute all of some new sequences' prompts, `budget` tokens a step."""
        steps: list[dict[SequenceId, int]] = [{}]
        for seq_id in seq_ids:
            left = self._length[seq_id] - self._computed[seq_id]
            while left:
                room = budget - sum(steps[-1].values())
                if not room or seq_id in steps[-1]:
                    steps.append({})
                    continue
                steps[-1][seq_id] = min(left, room)
                left -= steps[-1][seq_id]
        return self.ahead(len(steps), lambda number: self.launch(steps[number]))

    def decode(self, seq_ids: Sequence[SequenceId], num_steps: int) -> Ran:
        """One token for each of some sequences in each step."""
        return self.ahead(num_steps, lambda _: self.launch(dict.fromkeys(seq_ids, 1)))
