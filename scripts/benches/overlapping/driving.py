"""The CPU executor driven without a scheduler: steps one at a time, and two lanes that are idle or busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from repertory.actors.devices.codec import LaneFailed
from repertory.actors.devices.threads import DeviceThreads
from repertory.gpu.cpu.executor import CpuExecutor
from repertory.gpu.models.source import resolve_model
from repertory.protocol.config import EngineConfig
from repertory.protocol.ids import BlockId, CopyId, Epoch, SequenceId, StepId
from repertory.protocol.messages import CopyBlocks, CopyDirection, CopyDone, DeviceShared, Fences, RunStep, StepDone, StepFailed

COPY_BLOCKS, QUEUED = 32, 2
"""Blocks of a copy, as many as the scheduler's copies ahead of need have, and copies that a busy lane has in its queue."""
LANE_BLOCKS = 256
"""Blocks on each tier that a lane moves to and fro: more than the caches hold."""
EPOCH = Epoch(1)
DIRECTIONS: tuple[CopyDirection, CopyDirection] = ("out", "in")


class Clocked(CpuExecutor):
    """Takes note of how long the compute thread really ran in the last step."""

    cpu_s = 0.0

    def run_step(self, step: RunStep) -> StepDone:
        """Run the step."""
        began = time.thread_time()
        try:
            return super().run_step(step)
        finally:
            self.cpu_s = time.thread_time() - began


class Lane:
    """One direction: while it is busy, as many copies as it takes are under way."""

    def __init__(self, direction: CopyDirection, send: Callable[[CopyBlocks], None], device: int, host: int) -> None:
        """`device` and `host` are the first of its `LANE_BLOCKS` blocks on each tier."""
        self.last_sent = CopyId(0)
        self.done: list[tuple[float, CopyDone]] = []
        """Copies and when they had ended."""
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self._direction = direction
        self._send = send
        self._first = (device, host) if direction == "out" else (host, device)
        self._is_busy = False
        self._num_under_way = 0

    def start(self) -> None:
        """Be busy from here on."""
        self._is_busy = True
        self.is_idle.clear()
        for _ in range(QUEUED):
            self._send_next()

    async def stop(self) -> None:
        """Be idle, when what is under way has ended."""
        self._is_busy = False
        await self.is_idle.wait()

    def on_done(self, done: CopyDone) -> None:
        """A copy has ended: the next one."""
        if not done.ok:
            raise SystemExit(f"a copy failed: {done.reason}")
        self.done.append((time.perf_counter(), done))
        self._num_under_way -= 1
        if self._is_busy:
            self._send_next()
        elif not self._num_under_way:
            self.is_idle.set()

    def _send_next(self) -> None:
        first = self.last_sent * COPY_BLOCKS % LANE_BLOCKS
        sources, targets = ([BlockId(start + first + i) for i in range(COPY_BLOCKS)] for start in self._first)
        self.last_sent = CopyId(self.last_sent + 1)
        self._num_under_way += 1
        self._send(CopyBlocks(EPOCH, self.last_sent, self._direction, Fences(), sources, targets))


class Ran(NamedTuple):
    """A step that ran. Seconds; `cpu_s` are those in which the compute thread really did."""

    start: float
    end: float
    step_s: float
    cpu_s: float
    waited_s: float


class Driver:
    """An executor with its three threads, and what they are sent."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.threads = DeviceThreads(EPOCH, self._open, self._on_message)
        self._executor: Clocked | None = None
        self._answer: asyncio.Future[StepDone] | None = None
        self._last_step = StepId(0)
        # Past the blocks of the sequences; each lane has its own on both tiers.
        device = (config.num_device_blocks or 0) - 2 * LANE_BLOCKS
        self.lanes = {
            direction: Lane(direction, self.threads.send, device + i * LANE_BLOCKS, i * LANE_BLOCKS)
            for i, direction in enumerate(DIRECTIONS)
        }

    async def step(self, rows: list[tuple[int, int, int]], *, after: Fences | None = None, **parts: Any) -> Ran:
        """Run a step of (sequence, first token, number of tokens), each of which samples; `parts` of it as in `RunStep`."""
        assert self._executor is not None
        self._last_step = StepId(self._last_step + 1)
        self._answer = asyncio.get_running_loop().create_future()
        step = RunStep(
            EPOCH,
            self._last_step,
            after or Fences(),
            seq_ids=[SequenceId(seq_id) for seq_id, _, _ in rows],
            starts=[first for _, first, _ in rows],
            num_tokens=[count for _, _, count in rows],
            samples=[1] * len(rows),
            **parts,
        )
        start = time.perf_counter()
        self.threads.send(step)
        done = await self._answer
        return Ran(start, time.perf_counter(), done.seconds, self._executor.cpu_s, done.waited_s)

    def sent(self) -> Fences:
        """The copies that have been sent."""
        return Fences(copy_out=self.lanes["out"].last_sent, copy_in=self.lanes["in"].last_sent)

    async def copy_alone(self, seconds: float) -> float:
        """Both lanes busy and nothing else: bytes a second of both together."""
        before = [len(lane.done) for lane in self.lanes.values()]
        began = time.perf_counter()
        self.start_lanes()
        await asyncio.sleep(seconds)
        await self.stop_lanes()
        took_s = time.perf_counter() - began
        lanes = zip(self.lanes.values(), before, strict=True)
        return sum(done.num_bytes for lane, first in lanes for _, done in lane.done[first:]) / took_s

    def start_lanes(self) -> None:
        """Both lanes are busy from here on."""
        for lane in self.lanes.values():
            lane.start()

    async def stop_lanes(self) -> None:
        """Both are idle again."""
        for lane in self.lanes.values():
            await lane.stop()

    def _open(self) -> Clocked:
        self._executor = Clocked(resolve_model(self.config.model), config=self.config)
        return self._executor

    def _on_message(self, message: StepDone | StepFailed | CopyDone | LaneFailed | DeviceShared) -> None:
        match message:
            case DeviceShared():
                pass  # what is measured here is printed with the machine's load
            case CopyDone():
                self.lanes[message.direction].on_done(message)
            case StepDone() if self._answer is not None:
                self._answer.set_result(message)
            case _:
                raise SystemExit(f"the device failed: {message}")  # the one kind that ends the loop from a callback
