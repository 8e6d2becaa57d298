"""What would have happened: a workload under a configuration, on a device whose durations a model tells."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

import msgspec

from ...protocol.capacity import Capacity
from ...protocol.config import EngineConfig
from ...protocol.ids import RequestId
from ...protocol.messages import Closed, CopyBlocks, Refused, RunStep, TokensSampled
from ...protocol.outputs import EngineStats
from ..scheduling.core import SchedulerCore
from ..scheduling.sequence import Sequence
from ..scheduling.sharing import Group, SharedGroups
from .counting import CountingExecutor
from .latency import LatencyModel
from .run import Operation, VirtualRun
from .workload import Job, admits


class Moment(NamedTuple):
    """How things stood when a step was sent."""

    at: float
    kv_share: float  # of the device's blocks, those that running requests hold
    cached_share: float  # those that are cache only
    num_running: int
    num_waiting: int  # waiting and preempted
    num_prefill_tokens: int
    num_decodes: int


class Seen(msgspec.Struct, kw_only=True):
    """One sequence as its client saw it: `at_s` is when each token came, in seconds of the simulated clock."""

    job: int
    arrival_s: float
    num_prompt_tokens: int
    at_s: list[float] = []


class Outcome(msgspec.Struct, kw_only=True):
    """One run."""

    name: str
    seen: list[Seen]
    moments: list[Moment]
    num_refused: int
    duration_s: float
    """From the first arrival to the last token."""
    num_steps: int
    num_hit_tokens: int
    num_queried_tokens: int
    num_preemptions: dict[str, int]
    swap_bytes: int = 0
    busy_s: float = 0.0
    """Seconds that the device computed."""


class _ByLoad:
    """`LatencyModel` for a core's own steps, whose loads it knows: a step of 256 rows is not counted again."""

    def __init__(self, model: LatencyModel, core: SchedulerCore) -> None:
        self._model = model
        self._core = core
        self.of_copy: Callable[[CopyBlocks, int], float] = model.of_copy

    def of_step(self, step: RunStep) -> float:
        return self._model.of_load(*self._core.load_of(step))


class _NoGroups(SharedGroups):
    """What rows share matters to a device that reads memory. No decision depends on it, and it takes a quarter of the time."""

    def of(self, decodes: list[Sequence]) -> list[Group]:
        return []


class WhatIfRun(VirtualRun):
    """`serve` runs `jobs`, ordered by arrival, to the end of the last. Raises `ConfigError` for an unknown policy."""

    def __init__(
        self,
        config: EngineConfig,
        capacity: Capacity,
        latency: LatencyModel,
        jobs: Items[Job],
        *,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config, CountingExecutor(capacity, jobs), latency)
        self.core.groups = _NoGroups(capacity.block_size)
        self.device.latency = _ByLoad(latency, self.core)
        self.seen: dict[tuple[RequestId, int], Seen] = {}
        self.moments: list[Moment] = []
        self.num_refused = 0
        self._jobs = jobs
        self._on_end = on_end

    def serve(self, name: str) -> Outcome:
        """Run everything; the outcome is called `name`."""
        self.go(admits(self._jobs))
        stats: EngineStats = self.core.stats()
        last_s = max((seen.at_s[-1] for seen in self.seen.values()), default=0.0)
        return Outcome(
            name=name,
            seen=list(self.seen.values()),
            moments=self.moments,
            num_refused=self.num_refused,
            duration_s=last_s - (self._jobs[0].arrival_s if self._jobs else 0.0),
            num_steps=stats.num_steps,
            num_hit_tokens=stats.prefix_cache_hits,
            num_queried_tokens=stats.prefix_cache_queries,
            num_preemptions=dict(stats.num_preemptions),
            swap_bytes=stats.swap_in_bytes + stats.swap_out_bytes,
            busy_s=self.device.busy_s["step"],
        )

    def _issue(self, operation: Operation) -> None:
        if isinstance(operation, RunStep) and operation.seq_ids:
            queues, cache = self.core.queues, self.core.cache
            num_free, num_cached, total = cache.pool.num_free, cache.tree.num_evictable, cache.num_blocks
            load = self.core.load_of(operation)
            self.moments.append(
                Moment(
                    self.now,
                    (total - num_free - num_cached) / total,
                    num_cached / total,
                    len(queues.running),
                    len(queues.waiting) + len(queues.recovery),
                    load.num_prefill_tokens,
                    sum(operation.num_tokens) - load.num_prefill_tokens,
                )
            )
        super()._issue(operation)

    def _listen(self) -> None:
        self.core.take_reports()
        for output in self.core.take_outputs(self.now):
            if isinstance(output, TokensSampled):
                self._hear(output)
            elif isinstance(output, Refused):
                self.num_refused += 1
                self._on_end()

    def _hear(self, output: TokensSampled) -> None:
        now, seen = self.now, self.seen
        indices = output.indices or [0] * len(output.request_ids)
        for key in zip(output.request_ids, indices, strict=True):
            one = seen.get(key)
            if one is None:
                job = self._jobs[key[0] - 1]
                one = seen[key] = Seen(job=key[0] - 1, arrival_s=job.arrival_s, num_prompt_tokens=job.num_prompt_tokens)
            one.at_s.append(now)
        for end in output.ended:
            self.ended[end.request_id] = now
            if self.core.table.get(end.request_id) is None:
                self._on_end()
        self.core.on_closed(Closed([end.request_id for end in output.ended]))
