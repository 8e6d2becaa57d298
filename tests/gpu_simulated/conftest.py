"""A hand-driven device: tests say what each step holds, the driver numbers the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from repertory.gpu.simulated import SimulatedExecutor
from repertory.protocol.messages import BlockCopy, Fences, NewRow, RunStep, StepDone, TableEdit
from repertory.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Driver:
    """Sends steps to one executor. A row is (sequence, start, number of tokens, samples)."""

    def __init__(self, **knobs: Any) -> None:
        sizes = {"num_device_blocks": 16, "block_size": 4, "vocab_size": 1000, "max_model_len": 256}
        self.executor = SimulatedExecutor(**{**sizes, **knobs})
        self.admitted: list[NewRow] = []
        self.edits: list[TableEdit] = []
        self.copies: list[BlockCopy] = []
        self.released: list[int] = []
        self.last_step = 0

    def admit(
        self, seq_id: int, tokens: Sequence[int], table: Sequence[int], params: SamplingParams = GREEDY, **more: Any
    ) -> None:
        more.setdefault("num_prompt_tokens", len(tokens))
        self.admitted.append(NewRow(seq_id, list(tokens), params=params, block_table=list(table), **more))

    def edit(self, seq_id: int, first: int, *blocks: int) -> None:
        self.edits.append(TableEdit(seq_id, first, list(blocks)))

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        self.copies.append(BlockCopy(source, target, num_tokens))

    def release(self, *seq_ids: int) -> None:
        self.released.extend(seq_ids)

    def message(self, *rows: tuple[int, int, int, int], epoch: int = 1, step_id: int | None = None, **more: Any) -> RunStep:
        self.last_step = self.last_step + 1 if step_id is None else step_id
        more.setdefault("after", Fences())
        columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
        step = RunStep(
            epoch=epoch,
            step_id=self.last_step,
            seq_ids=columns[0],
            starts=columns[1],
            num_tokens=columns[2],
            samples=columns[3],
            admitted=self.admitted,
            released=self.released,
            table_edits=self.edits,
            copies=self.copies,
            **more,
        )
        self.admitted, self.released, self.edits, self.copies = [], [], [], []
        return step

    def step(self, *rows: tuple[int, int, int, int], **more: Any) -> StepDone:
        return self.executor.run_step(self.message(*rows, **more))

    def decode(self, seq_id: int, log: list[int], count: int) -> None:
        """Decode `count` tokens of one sequence whose KV is written up to its last token; `log` grows."""
        for _ in range(count):
            log.append(self.step((seq_id, len(log) - 1, 1, 1)).token_ids[0])


@pytest.fixture
def drive() -> Callable[..., Driver]:
    """Makes a `Driver`; keywords are the executor's."""
    return Driver
