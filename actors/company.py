"""The actors of an embedded engine: who there is, how they are joined, in which order they come and go.

    Submit, Abort            Admit, Abort              RunStep, StepDone
    frontend ----> Tokenizer ----------> Scheduler <==========> Worker
        ^              | Refused             |   <==========> SwapManager
        |              v                     |  CopyBlocks, CopyDone
        +---------- Detokenizer <------------+
          TextOut        | Abort(stop)        TokensSampled
                         v
                     Scheduler

All of them share the application's event loop; the device has a process of its own, or threads. Left of the Scheduler
is the frontend half, the rest is the core half (`frontend_half.py`, `core_half.py`); here they are joined by reference,
served each is a process.
No circle of waiting: the frontend never waits, the detokenizer waits only for the frontend, the
scheduler only for the detokenizer, the tokenizer for both.

A Tokenizer or Detokenizer that crashes is started again and asks for what it lost; a device that
dies is replaced by its keeper. A crash of the scheduler or the dispatcher ends the engine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio
import anyio.to_thread

from ..gpu.models.config import load_model_config
from ..protocol.capacity import Capacity
from ..protocol.config import EngineConfig
from .core_half import CoreHalf, left_over, mailbox_bound, settled
from .devices.keeper import DeviceKeeper
from .frontend_half import FrontendHalf
from .loop_lag import watch_loop
from .mailbox import Mailbox
from .resolving import Resolver, read_prompts_for, resolver_for
from .scheduler import SchedulerInbox
from .scheduling.core import SchedulerCore


class Company:
    """Every actor of one engine, made and joined. `open` makes it; `run` keeps it going until cancelled."""

    def __init__(self, keeper: DeviceKeeper, capacity: Capacity, resolver: Resolver, config: EngineConfig) -> None:
        # What can fail comes first: nothing has to be closed then.
        core = SchedulerCore(config, capacity, epoch=keeper.epoch)
        bound = mailbox_bound(config)
        inbox: Mailbox[SchedulerInbox] = Mailbox("scheduler", bound)
        self.frontend = FrontendHalf(resolver, inbox, bound=bound)
        self.core = CoreHalf(core, keeper=keeper, inbox=inbox, listener=self.frontend.samples)
        self.core.elsewhere = lambda: self.frontend.actor_loads("core")
        self.keeper = keeper
        self.capacity = capacity
        self.resolver = resolver
        self.submissions = self.frontend.submissions
        self.dispatcher = self.frontend.dispatcher
        self.tokenizer = self.frontend.tokenizer
        self.detokenizer = self.frontend.detokenizer
        self.scheduler = self.core.scheduler

    @classmethod
    async def open(cls, config: EngineConfig, model_dir: Path, keeper: DeviceKeeper) -> Company:
        """Open the device and read the tokenizer, side by side. Raises `ConfigError` or `ModelLoadError`."""
        model = await anyio.to_thread.run_sync(load_model_config, model_dir)
        reading = asyncio.ensure_future(anyio.to_thread.run_sync(read_prompts_for, config, model_dir, model))
        try:
            capacity = await keeper.open()
        except BaseException:
            await asyncio.wait([reading])
            raise
        return cls(keeper, capacity, resolver_for(await reading, config, capacity, model), config)

    async def run(self) -> None:
        """Run every actor until cancelled. An exception that escapes one ends them all and is raised."""
        async with anyio.create_task_group() as actors:
            actors.start_soon(self.frontend.run)
            actors.start_soon(self.core.run)
            actors.start_soon(watch_loop)

    def close(self) -> None:
        """Close the mailboxes."""
        self.frontend.close()
        self.core.close()

    @property
    def is_idle(self) -> bool:
        """Whether no request is anywhere, and everybody has been told."""
        return self.core.is_idle and self.frontend.is_idle

    async def settle(self, timeout_s: float) -> bool:
        """Wait until the company is idle; False when it closed before, or `timeout_s` seconds were not enough."""
        return await settled(self, lambda: self.core.is_closed, timeout_s)

    def audit(self) -> list[str]:
        """Everything that does not add up over all actors. Tables must be empty once nothing is live."""
        core = self.scheduler.core
        found = core.audit()
        if not core.num_live:
            found += left_over(self.frontend.tables() | self.core.tables())
        return found
