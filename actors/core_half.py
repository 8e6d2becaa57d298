"""The half of a company that decides: the Scheduler and the device it keeps.

                    RunStep, StepDone
    frontends <==> Scheduler <==========> Worker
                        <==========> SwapManager
                    CopyBlocks, CopyDone

Whom it speaks to, it does not know: `listener` takes its tokens and refusals, for a Detokenizer in the same loop or
for links to many. It imports no model library, so it can be a process that nothing heavy slows down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import anyio

from ..protocol.config import EngineConfig
from ..protocol.metrics import ActorLoad, CoreMetrics
from ..protocol.view import CompanyView
from .devices.keeper import DeviceKeeper
from .mailbox import Mailbox
from .observing.loads import load_of
from .observing.periodic import PeriodicStatistics
from .observing.recorder import Recorder
from .scheduler import Listener, Scheduler, SchedulerInbox
from .scheduling.core import SchedulerCore
from .scheduling.looking import metrics_of, view_of

SPARE_ROOM = 256
"""Inbox room beyond one message for every request there can be."""

SETTLE_POLL_S = 0.002


class CoreHalf:
    """The Scheduler and the keeper of its device, joined. `run` keeps them going until cancelled."""

    def __init__(
        self,
        core: SchedulerCore,
        *,
        keeper: DeviceKeeper,
        inbox: Mailbox[SchedulerInbox],
        listener: Listener,
    ) -> None:
        self.keeper = keeper
        self.inbox = inbox
        self.recorder = None if core.config.trace_file is None else Recorder(core, core.config)
        self.scheduler = Scheduler(
            core,
            inbox=inbox,
            device=keeper.send,
            detokenizer=listener,
            on_culprit=keeper.on_progress,
            recorder=self.recorder,
        )
        self.is_closed = False
        self.statistics = PeriodicStatistics(core, self.actor_loads)
        self.elsewhere: Callable[[], list[ActorLoad]] = list
        """Loads of actors that are not in this half: the frontends'."""
        keeper.report_to(inbox.post_nowait)

    async def run(self) -> None:
        """Run the actors until cancelled. An exception that escapes one ends both and is raised."""
        async with anyio.create_task_group() as actors:
            actors.start_soon(self.scheduler.run)
            actors.start_soon(self.keeper.run)
            actors.start_soon(self.statistics.run)

    def close(self) -> None:
        """Close the inbox, and the trace if there is one."""
        if self.is_closed:
            return
        self.is_closed = True
        self.scheduler.close()
        self.inbox.close()
        if self.recorder is not None:
            self.recorder.close()

    # ---- facts ----------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is live here, nothing is under way, and everybody has been told."""
        core, num_open = self.scheduler.core, len(self.scheduler.accounts)
        busy = core.num_live, core.num_in_flight, core.num_copies, len(core.telling.histories), num_open, len(self.inbox)
        return not any(busy)

    def actor_loads(self) -> list[ActorLoad]:
        """Of all actors that are known of."""
        return [load_of(self.inbox, "core"), *self.elsewhere()]

    def metrics(self) -> CoreMetrics:
        """All that is counted."""
        actors = self.actor_loads()
        return metrics_of(self.scheduler.core, actors, num_frontends=_num_frontends(actors))

    def view(self) -> CompanyView:
        """What there is to see now."""
        actors = self.actor_loads()
        return view_of(self.scheduler.core, time.monotonic(), actors, num_frontends=_num_frontends(actors))

    async def settle(self, timeout_s: float) -> bool:
        """Wait until this half is idle; False when it closed before, or `timeout_s` seconds were not enough."""
        return await settled(self, lambda: self.is_closed, timeout_s)

    def tables(self) -> dict[str, int]:
        """What each table holds; nothing, once no request is live."""
        core = self.scheduler.core
        tables = {
            "histories": len(core.telling.histories),
            "accounts": len(self.scheduler.accounts),
            "worker": self.keeper.num_sequences,
        }
        if not core.num_copies:
            stats = core.stats()
            tables["device blocks referenced"] = stats.device_blocks.referenced
            tables["host blocks referenced"] = stats.host_blocks.referenced
        return tables


def _num_frontends(actors: list[ActorLoad]) -> int:
    return len({actor.process for actor in actors if actor.name == "dispatcher"})


class Settling(Protocol):
    """What can have nothing left to do."""

    @property
    def is_idle(self) -> bool:
        """Whether it has."""
        ...


async def settled(one: Settling, is_over: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until it is idle; False when it was over before, or `timeout_s` seconds were not enough."""
    with anyio.move_on_after(timeout_s):
        while not (one.is_idle or is_over()):  # noqa: ASYNC110 - idleness is a fact about tables, not an event
            await anyio.sleep(SETTLE_POLL_S)
    return one.is_idle


def mailbox_bound(config: EngineConfig) -> int:
    """Messages that a mailbox holds unread: one for every request there can be, and some."""
    return config.max_num_queued + config.running_limit + SPARE_ROOM


def left_over(tables: dict[str, int]) -> list[str]:
    """What is still in `tables` although no request is live, in words."""
    return [f"{name}: {count} left although no request is live" for name, count in tables.items() if count]
