"""A scheduler that is told anything at any time, and a recorder beside it: traces to replay, without a loop or a device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from repertory.actors.observing.recorder import Recorder
from repertory.actors.scheduler import Scheduler
from repertory.actors.scheduling.core import SchedulerCore
from repertory.protocol.capacity import Capacity
from repertory.protocol.config import EngineConfig
from repertory.protocol.ids import Epoch, RequestId
from repertory.protocol.messages import (
    Abort,
    Admit,
    CopyBlocks,
    CopyDone,
    Credit,
    DeviceLost,
    DeviceReady,
    DeviceShared,
    FailedRow,
    Resend,
    RunStep,
    StepDone,
)
from repertory.protocol.sampling import SamplingParams

BLOCK_SIZE = 3
STOP_ID = 7
VOCABULARY = (1, 2, 256, 257, 65_536, STOP_ID)
"""Few tokens, so that logs agree by chance, and such whose order as bytes is not that of their numbers."""


class Recording:
    """`act` does one thing at random. Whatever `seed` comes to, what is recorded must replay to the same decisions."""

    def __init__(self, path: Path, seed: int, *, content: bool = False, **settings: Any) -> None:
        self.draw = random.Random(seed)
        settings = {"max_num_seqs": 6, "max_num_batched_tokens": 8, "credit_window": 9, "max_num_queued": 5, **settings}
        settings.setdefault("preemption_mode", "swap" if seed % 2 else "auto")
        self.config = EngineConfig(
            model="recorded", block_size=BLOCK_SIZE, trace_file=str(path), trace_content=content, api_key="secret", **settings
        )
        capacity = Capacity("here", 24, 14, BLOCK_SIZE, 1000, 1 << 20, 60, copy_out_rate=1e6, copy_in_rate=1e6)
        self.now = 100.0
        self.core = SchedulerCore(self.config, capacity, epoch=Epoch(1))
        self.recorder = Recorder(self.core, self.config, clock=self._tick)
        self.steps: list[RunStep] = []
        self.copies: dict[str, list[CopyBlocks]] = {"out": [], "in": []}
        self.requests: list[RequestId] = []
        self.prompts: list[list[int]] = []
        self.scheduler = Scheduler(
            self.core,
            inbox=None,
            device=self._send,
            detokenizer=None,
            on_culprit=lambda: None,
            recorder=self.recorder,
            clock=self._tick,
        )

    def run(self, num_turns: int) -> None:
        """So many turns, then the end of the trace, whatever is under way."""
        for _ in range(num_turns):
            self.turn([message for _ in range(self.draw.randint(1, 3)) for message in self.some_messages()])
        self.recorder.close()

    def turn(self, messages: list[Any]) -> None:
        """What the actor does with a batch."""
        now = self._tick()
        for message in messages:
            self.scheduler._handle(message, now)
        self.scheduler.send_steps()
        self.recorder.told(self.core.take_outputs(now), self.core.take_reports(), now)
        assert self.core.audit() == []

    def some_messages(self) -> list[Any]:
        """What comes next: mostly answers, so that there is progress."""
        kind = self.draw.random()
        if kind < 0.25:
            return [self.arrival()]
        if kind < 0.75:
            return self.answer()
        if kind < 0.9:
            return self.end_of_copy()
        return self.disturbance()

    def arrival(self) -> Admit:
        """A prompt of its own, or one that begins like an earlier one."""
        draw, number = self.draw, RequestId(len(self.requests) + 1)
        prompt = draw.choices(VOCABULARY, k=draw.randint(1, 14))
        if self.prompts and draw.random() < 0.7:
            earlier = draw.choice(self.prompts)
            prompt = earlier[: draw.randint(0, len(earlier))] + prompt[: draw.randint(1, 6)]
        self.requests.append(number)
        self.prompts.append(prompt)
        params = SamplingParams(
            n=draw.choice([1, 1, 1, 2, 3]),
            max_tokens=draw.choice([1, 2, 5, 9, 20, None]),
            output_kind=draw.choice(["cumulative", "final_only"]),
        )
        return Admit(
            number,
            f"label {number}",
            prompt,
            params,
            self.now,
            stop_token_ids=draw.choice([[], [STOP_ID]]),
            priority=draw.randint(0, 2),
            tenant=draw.choice([None, "a"]),
            cache_salt=draw.choice([None, None, "salt"]),
        )

    def answer(self) -> list[StepDone]:
        """The oldest step in flight comes back; now and then a row of it has failed."""
        if not self.steps:
            return []
        step, draw = self.steps.pop(0), self.draw
        samplers = [seq_id for seq_id, samples in zip(step.seq_ids, step.samples, strict=True) if samples]
        failed = [seq_id for seq_id in samplers if draw.random() < 0.02]
        kept = [seq_id for seq_id in samplers if seq_id not in failed]
        tokens = draw.choices(VOCABULARY, k=len(kept))
        self.requests_to_repeat(kept, tokens)
        rows = [FailedRow(seq_id, "not finite", draw.random() < 0.5) for seq_id in failed]
        waited_s = draw.choice([0.0, 0.0, 0.003])
        return [StepDone(step.epoch, step.step_id, kept, tokens, draw.uniform(0.001, 0.02), rows, waited_s=waited_s)]

    def requests_to_repeat(self, seq_ids: list[Any], tokens: list[int]) -> None:
        """Later prompts may go on from what was generated, as a chat's next turn does."""
        for seq_id, token in zip(seq_ids, tokens, strict=True):
            seq = self.core.table.sequences.get(seq_id)
            if seq is not None and self.draw.random() < 0.2:
                self.prompts.append([*seq.log.tolist(), token][:30])

    def end_of_copy(self) -> list[CopyDone]:
        """The oldest copy of a lane ends, mostly well."""
        lane = self.draw.choice(["out", "in"])
        if not self.copies[lane]:
            return []
        copy = self.copies[lane].pop(0)
        ok, seconds = self.draw.random() < 0.75, self.draw.uniform(0.0001, 0.01)
        return [CopyDone(copy.epoch, copy.copy_id, copy.direction, 1000 * len(copy.sources), seconds, 0.001, ok)]

    def disturbance(self) -> list[Any]:
        """Clients and devices."""
        draw, epoch = self.draw, self.core.epoch
        if not self.requests:
            return []
        request = draw.choice(self.requests)
        match draw.randrange(8):
            case 0:
                return [Abort(request)]
            case 1:
                return [Abort(request, "stop", draw.randrange(3))]
            case 2 | 3:
                return [Credit(request, draw.randint(1, 9), draw.randrange(3))]
            case 4:
                return [Resend(request)]
            case 5:
                return [DeviceShared(epoch, "somebody")]
            case 6 if draw.random() < 0.3:
                self.steps.clear()
                self.copies = {"out": [], "in": []}
                return [DeviceLost(epoch, "gone"), DeviceReady(Epoch(epoch + 1))]
            case _:
                self.scheduler.reset_cache()
        return []

    def _send(self, operation: RunStep | CopyBlocks, predicted_s: float | None) -> None:
        if isinstance(operation, RunStep):
            self.steps.append(operation)
        else:
            self.copies[operation.direction].append(operation)

    def _tick(self) -> float:
        self.now += self.draw.choice([1e-5, 1e-4, 0.004])
        return self.now
