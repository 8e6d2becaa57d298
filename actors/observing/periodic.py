"""One line of statistics every ten seconds, while there is something to do."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
import msgspec

from ...protocol.ids import show_request_id
from ...protocol.metrics import ActorLoad
from ...protocol.outputs import BlockCounts
from ..scheduling.core import SchedulerCore
from ..scheduling.looking import slowest_requests
from .logs import logger

PERIOD_S = 10.0
NUM_SLOWEST = 3


class _Mark(msgspec.Struct, frozen=True):
    at_s: float
    num_prefill_tokens: int
    num_generated_tokens: int
    num_queries: int
    num_hits: int
    num_steps: int
    step_s: float
    num_faults: int


class PeriodicStatistics:
    """Writes `engine.stats`: rates and means over the time since the last line, the rest as it is now."""

    def __init__(
        self,
        core: SchedulerCore,
        actor_loads: Callable[[], list[ActorLoad]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._actor_loads = actor_loads
        self._clock = clock
        self._log = logger("scheduler")
        self._last = self._mark()

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            await anyio.sleep(PERIOD_S)
            try:
                self.tick()
            except Exception as error:  # what is only looked at must not end what it looks at
                self._log.warning("metrics.failed", reason=repr(error), exc_info=error)

    def tick(self) -> None:
        """A period is over. Says nothing where nothing has run and nothing waits."""
        last, now = self._last, self._mark()
        self._last = now
        if now.num_faults > last.num_faults:
            self._log.warning("metrics.failed", reason=self._core.telling.counts.fault)
        if self._core.num_live or now.num_steps > last.num_steps:
            self._say(last, now)

    def _say(self, last: _Mark, now: _Mark) -> None:
        core, stats = self._core, self._core.stats()
        seconds = now.at_s - last.at_s
        slowest = slowest_requests(core, now.at_s, NUM_SLOWEST)
        self._log.info(
            "engine.stats",
            prompt_throughput=_ratio(now.num_prefill_tokens - last.num_prefill_tokens, seconds, 1),
            generation_throughput=_ratio(now.num_generated_tokens - last.num_generated_tokens, seconds, 1),
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_preempted=stats.num_preempted,
            num_paused=stats.num_paused,
            device_kv_usage=device_usage(stats.device_blocks),
            host_kv_usage=host_usage(stats.host_blocks),
            prefix_cache_hit_rate=_ratio(now.num_hits - last.num_hits, now.num_queries - last.num_queries),
            step_s=_ratio(now.step_s - last.step_s, now.num_steps - last.num_steps, 6),
            num_steps=now.num_steps - last.num_steps,
            inbox_depths=_depths(self._actor_loads()),
            slowest=[
                {
                    "request_id": show_request_id(one.request_id),
                    "label": one.label,
                    "age_s": round(one.age_s, 3),
                    "stage": one.stage,
                }
                for one in slowest
            ],
        )

    def _mark(self) -> _Mark:
        core, counts = self._core, self._core.telling.counts
        return _Mark(
            self._clock(),
            counts.num_prefill_tokens,
            counts.num_generated_tokens,
            core.planner.num_queried_tokens,
            core.planner.num_hit_tokens,
            core.num_steps,
            counts.step_s,
            counts.num_faults,
        )


def device_usage(blocks: BlockCounts) -> float:
    """The share of device blocks that somebody holds. Those of cache alone are as good as free."""
    return _ratio(blocks.referenced, blocks.total) or 0.0


def host_usage(blocks: BlockCounts) -> float:
    """The share of host blocks that are not free: cache is what they are for."""
    return _ratio(blocks.total - blocks.free, blocks.total) or 0.0


def _depths(loads: list[ActorLoad]) -> dict[str, int]:
    depths: dict[str, int] = {}
    for load in loads:
        depths[load.name] = depths.get(load.name, 0) + load.depth
    return depths


def _ratio(part: float, whole: float, digits: int = 4) -> float | None:
    return round(part / whole, digits) if whole > 0 else None
