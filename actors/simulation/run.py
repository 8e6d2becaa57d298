"""A scheduler core and a simulated device under a virtual clock: events in order of time, nothing waits.

Operations name only operations that were issued before them, and their durations are known when they are issued.
So the moment at which each begins and ends can be told at once, and all the clock does is to go from one answer,
arrival or wake-up to the next. The device's memory is real bookkeeping: each operation takes effect when it ends,
in that order, and a row that reads what it should not raises (`gpu/simulated`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from ...gpu.executor import Executor
from ...protocol.config import EngineConfig
from ...protocol.ids import Epoch, RequestId
from ...protocol.messages import Admit, CopyBlocks, Fences, RunStep, TokensSampled
from ..scheduling.core import SchedulerCore
from ..scheduling.reports import Report
from .latency import Latency

Operation = RunStep | CopyBlocks


class Span(NamedTuple):
    """When an operation begins and ends, and for how long its server waited for others before it."""

    start: float
    end: float
    waited_s: float


class VirtualDevice:
    """Three servers - steps, copies out, copies in - that begin an operation when the last one and its fences have ended."""

    def __init__(self, executor: Executor, latency: Latency) -> None:
        self.executor = executor
        self.latency = latency
        self._ends: dict[tuple[str, int], float] = {}
        self._free_at = {"step": 0.0, "out": 0.0, "in": 0.0}
        self.busy_s = {"step": 0.0, "out": 0.0, "in": 0.0}
        self.waited_s = {"step": 0.0, "out": 0.0, "in": 0.0}

    def issue(self, operation: Operation, now: float) -> Span:
        """When an operation that is handed over now begins and ends."""
        if isinstance(operation, RunStep):
            server, number, seconds = "step", int(operation.step_id), self.latency.of_step(operation)
        else:
            server, number = operation.direction, int(operation.copy_id)
            seconds = self.latency.of_copy(operation, self.executor.capacity.block_bytes)
        ready = max(now, self._free_at[server])
        start = max(ready, self._met(operation.after))
        span = Span(start, start + seconds, start - ready)
        self._free_at[server] = self._ends[server, number] = span.end
        self.busy_s[server] += seconds
        self.waited_s[server] += span.waited_s
        return span

    def hang(self, server: str) -> None:
        """The server begins nothing any more: whatever it is handed from now on, or waits for that, has no end."""
        self._free_at[server] = math.inf

    def _met(self, after: Fences) -> float:
        named = (("step", after.step), ("out", after.copy_out), ("in", after.copy_in))
        return max(self._ends.get((server, int(number)), 0.0) for server, number in named)


@dataclass(order=True)
class _Event:
    at: float
    number: int
    happen: Callable[[], None] = field(compare=False)


class VirtualRun:
    """`arrivals` meet a scheduler and a device; `go` runs until all have ended."""

    def __init__(self, config: EngineConfig, executor: Executor, latency: Latency) -> None:
        self.device = VirtualDevice(executor, latency)
        self.core = SchedulerCore(config, executor.capacity, epoch=Epoch(1))
        self.now = 0.0
        self.still_s = 0.0
        """Seconds in which no step ran although requests were there: they waited for copies."""
        self.tokens: dict[RequestId, list[tuple[float, int]]] = {}
        """Each request's tokens and when they came."""
        self.ended: dict[RequestId, float] = {}
        self.reports: list[Report] = []
        self._events: list[_Event] = []
        self._num_events = 0

    def at(self, moment: float, happen: Callable[[], None]) -> None:
        """Have something happen at `moment`, behind all that was said to happen then before."""
        self._num_events += 1
        heapq.heappush(self._events, _Event(moment, self._num_events, happen))

    def go(self, arrivals: Iterable[Admit]) -> None:
        """Serve `arrivals`, ordered by `arrival_s`, to the end of the last."""
        coming = iter(arrivals)
        waiting = next(coming, None)
        while waiting is not None or self._is_going():
            self._plan()
            upcoming = [waiting.arrival_s] if waiting is not None else []
            upcoming += [self._events[0].at] if self._events else []
            wakeup = self._wakeup()
            upcoming += [wakeup] if wakeup is not None else []
            if not upcoming and not self._is_going():
                return
            assert upcoming, f"nothing will happen any more: {self.core.stats()}"
            self._pass(max(self.now, min(upcoming)))
            while self._events and self._events[0].at <= self.now:
                heapq.heappop(self._events).happen()
            while waiting is not None and waiting.arrival_s <= self.now:
                self.core.on_admit(waiting, self.now)
                waiting = next(coming, None)
            self._listen()

    def _pass(self, until: float) -> None:
        if not self.core.num_in_flight and self.core.queues.fetching:
            self.still_s += until - self.now
        self.now = until

    def _is_going(self) -> bool:
        return bool(self._events) or self.core.num_live > 0

    def _wakeup(self) -> float | None:
        return self.core.next_wakeup()

    def _decide(self) -> RunStep | None:
        return self.core.plan(self.now)

    def _plan(self) -> None:
        while True:
            step = self._decide()
            before, after = self.core.take_copies()
            steps = [] if step is None else [step]
            operations: list[Operation] = [*before, *steps, *after]
            for operation in operations:
                self._issue(operation)
            if step is None:
                return

    def _issue(self, operation: Operation) -> None:
        span = self.device.issue(operation, self.now)
        self.at(span.end, partial(self._answer, operation, span))

    def _answer(self, operation: Operation, span: Span) -> None:
        seconds, waited_s = span.end - span.start, span.waited_s
        if isinstance(operation, RunStep):
            done = self.device.executor.run_step(operation)
            self.core.on_step_done(msgspec.structs.replace(done, seconds=seconds, waited_s=waited_s), self.now)
        else:
            copied = self.device.executor.copy_blocks(operation)
            self.core.on_copy_done(msgspec.structs.replace(copied, seconds=seconds, waited_s=waited_s))

    def _listen(self) -> None:
        self.reports += self.core.take_reports()
        for output in self.core.take_outputs(self.now):
            if isinstance(output, TokensSampled):
                for request_id, token in zip(output.request_ids, output.token_ids, strict=True):
                    self.tokens.setdefault(request_id, []).append((self.now, token))
                for end in output.ended:
                    self.ended[end.request_id] = self.now
