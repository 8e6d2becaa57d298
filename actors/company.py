"""The actors of an embedded engine: who there is, how they are joined, in which order they come and go.

    Submit, Abort            Admit, Abort              RunStep, StepDone
    frontend ----> Tokenizer ----------> Scheduler <==========> Worker
        ^              | Refused             |   <==========> SwapManager
        |              v                     |  CopyBlocks, CopyDone
        +---------- Detokenizer <------------+
          TextOut        | Abort(stop)        TokensSampled
                         v
                     Scheduler

All of them share the application's event loop; the device has a process of its own, or threads.
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

from ..gpu.models.config import ModelConfig, load_model_config
from ..protocol.capacity import Capacity
from ..protocol.config import EngineConfig
from ..protocol.messages import Abort, Refused, Submit, TextOut, Tokenized, TokensSampled
from .detokenizer import Detokenizer
from .devices.keeper import DeviceKeeper
from .frontends.dispatcher import Dispatcher
from .loop_lag import watch_loop
from .mailbox import Mailbox
from .observing.recorder import Recorder
from .resolving import Resolver
from .scheduler import Scheduler, SchedulerInbox
from .scheduling.core import SchedulerCore
from .supervising import supervised
from .text.prompts import PromptReader
from .tokenizer import Tokenizer

SETTLE_POLL_S = 0.002
SPARE_ROOM = 256
"""Inbox room beyond one message for every request there can be."""


class Company:
    """Every actor of one engine, made and joined. `open` makes it; `run` keeps it going until cancelled."""

    def __init__(self, keeper: DeviceKeeper, capacity: Capacity, resolver: Resolver, config: EngineConfig) -> None:
        # What can fail comes first: nothing has to be closed then.
        core = SchedulerCore(config, capacity, epoch=keeper.epoch)
        self.recorder = None if config.trace_file is None else Recorder(core, config)
        bound = config.max_num_queued + config.running_limit + SPARE_ROOM
        self.keeper = keeper
        self.capacity = capacity
        self.resolver = resolver
        self.submissions: Mailbox[Submit | Abort] = Mailbox("tokenizer", bound)
        scheduler_inbox: Mailbox[SchedulerInbox] = Mailbox("scheduler", bound)
        samples: Mailbox[TokensSampled | Refused] = Mailbox("detokenizer", bound)
        texts: Mailbox[TextOut | Tokenized] = Mailbox("frontend", bound)
        self.dispatcher = Dispatcher(texts)
        self.tokenizer = Tokenizer(
            resolver, inbox=self.submissions, scheduler=scheduler_inbox, detokenizer=samples, frontend=texts
        )
        self.scheduler = Scheduler(
            core,
            inbox=scheduler_inbox,
            device=keeper.send,
            detokenizer=samples,
            on_culprit=keeper.on_progress,
            recorder=self.recorder,
        )
        self.detokenizer = Detokenizer(resolver.reader.tokenizer, inbox=samples, frontend=texts, scheduler=scheduler_inbox)
        self._is_closed = False
        self._mailboxes = (self.submissions, scheduler_inbox, samples, texts)
        keeper.report_to(scheduler_inbox.post_nowait)

    @classmethod
    async def open(cls, config: EngineConfig, model_dir: Path, keeper: DeviceKeeper) -> Company:
        """Open the device and read the tokenizer, side by side. Raises `ConfigError` or `ModelLoadError`."""
        model = await anyio.to_thread.run_sync(load_model_config, model_dir)
        reading = asyncio.ensure_future(anyio.to_thread.run_sync(_read_prompts_for, config, model_dir, model))
        try:
            capacity = await keeper.open()
        except BaseException:
            await asyncio.wait([reading])
            raise
        reader = (await reading).within(max_model_len=capacity.max_model_len, vocab_size=capacity.vocab_size)
        resolver = Resolver(reader, capacity, eos_token_ids=model.eos_token_ids, server_seed=config.seed)
        return cls(keeper, capacity, resolver, config)

    async def run(self) -> None:
        """Run every actor until cancelled. An exception that escapes one ends them all and is raised."""
        async with anyio.create_task_group() as actors:
            actors.start_soon(self.dispatcher.run)
            actors.start_soon(supervised, "detokenizer", self.detokenizer)
            actors.start_soon(self.scheduler.run)
            actors.start_soon(supervised, "tokenizer", self.tokenizer)
            actors.start_soon(self.keeper.run)
            actors.start_soon(watch_loop)

    def close(self) -> None:
        """Close the mailboxes, and the trace if there is one."""
        self._is_closed = True
        for mailbox in self._mailboxes:
            mailbox.close()
        if self.recorder is not None:
            self.recorder.close()

    @property
    def is_idle(self) -> bool:
        """Whether no request is anywhere, and everybody has been told."""
        core = self.scheduler.core
        busy = (
            core.num_live,
            core.num_in_flight,
            core.num_copies,
            len(core.telling.histories),
            self.tokenizer.num_reading,
            len(self.dispatcher),
        )
        return not any(busy) and not any(len(mailbox) for mailbox in self._mailboxes)

    async def settle(self, timeout_s: float) -> bool:
        """Wait until the company is idle; False when it closed before, or `timeout_s` seconds were not enough."""
        with anyio.move_on_after(timeout_s):
            while not (self.is_idle or self._is_closed):  # noqa: ASYNC110 - idleness is a fact about six tables, not an event
                await anyio.sleep(SETTLE_POLL_S)
        return self.is_idle

    def audit(self) -> list[str]:
        """Everything that does not add up over all actors. Tables must be empty once nothing is live."""
        core = self.scheduler.core
        found = core.audit()
        if not core.num_live:
            tables = {
                "detokenizer": len(self.detokenizer.core),
                "detokenizer's account": len(self.detokenizer.told),
                "tokenizer": self.tokenizer.num_reading,
                "frontend": len(self.dispatcher),
                "histories": len(core.telling.histories),
                "worker": self.keeper.num_sequences,
            }
            if not core.num_copies:
                tables["device blocks referenced"] = core.stats().device_blocks.referenced
                tables["host blocks referenced"] = core.stats().host_blocks.referenced
            found += [f"{name}: {count} left although no request is live" for name, count in tables.items() if count]
        return found


def _read_prompts_for(config: EngineConfig, model_dir: Path, model: ModelConfig) -> PromptReader:
    max_model_len = config.max_model_len or model.max_position_embeddings
    reader = PromptReader(
        model_dir, chat_template=config.chat_template, max_model_len=max_model_len, vocab_size=model.vocab_size
    )
    reader.warm()
    return reader
