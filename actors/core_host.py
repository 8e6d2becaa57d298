"""The core host: a process for the Scheduler and the device it keeps. `python -m repertory.actors.core_host`.

`repertory serve` starts it and tells it what to serve (`serving/lines.py`); it starts the device host. It imports no
model library. It is never its own master:

| what happens | what it does |
| --- | --- |
| its parent ends, in whatever way | standard input ends; it removes the endpoint's folder and is gone, its device host too |
| the device dies too often | it tells every frontend why, and ends |
| the Scheduler crashes, or the link | the same |
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from ..gpu.models.source import resolve_model
from ..protocol.errors import EngineDeadError, first_of
from ..protocol.link import Welcome, without_secrets
from .core_half import CoreHalf, mailbox_bound
from .devices.keeper import DeviceKeeper
from .devices.making import device_maker
from .devices.process import HOST_COMMAND
from .heap import freeze_heap
from .links.core_link import CoreLink
from .loop_lag import watch_loop
from .mailbox import Mailbox
from .observing.logs import logger
from .observing.start import say_ready, say_start
from .scheduler import SchedulerInbox
from .scheduling.core import SchedulerCore
from .serving.childhood import Parent, run_child
from .serving.lines import CoreOrders, FrontendOrders, Ready

LAG_HINT = "the scheduler's loop is late: leave it a core (num_threads), or run fewer sequences at a time (max_num_seqs)"


async def serve_core(orders: CoreOrders, parent: Parent, *, host_command: Sequence[str] = HOST_COMMAND) -> None:
    """Open the device and serve frontends at the endpoint until cancelled. Raises what ended it."""
    config, started, log = orders.config, time.monotonic(), logger("engine")
    model_dir = await anyio.to_thread.run_sync(
        lambda: resolve_model(config.model, progress=lambda text: log.info("model.progress", message=text))
    )
    keeper = DeviceKeeper(device_maker(config, Path(model_dir), host_command=host_command), config)
    try:
        capacity = await keeper.open()
        core = SchedulerCore(config, capacity, epoch=keeper.epoch)
        inbox: Mailbox[SchedulerInbox] = Mailbox("scheduler", mailbox_bound(config))
        link = CoreLink(orders.endpoint, inbox)
        half = CoreHalf(core, keeper=keeper, inbox=inbox, listener=link)
        say_start(log, config, capacity)
        reason = "it has been closed"
        try:
            link.bind()
            async with anyio.create_task_group() as actors:
                actors.start_soon(half.run)
                actors.start_soon(watch_loop, LAG_HINT)
                actors.start_soon(link.run, half, Welcome(without_secrets(config), capacity, str(model_dir)))
                freeze_heap()
                say_ready(log, time.monotonic() - started)
                parent.say(Ready())
        except Exception as error:
            failure = first_of(error)
            reason = str(failure) if isinstance(failure, EngineDeadError) else f"it has died: {failure!r}"
            log.error("engine.dead", reason=reason, exc_info=failure)
            raise failure from None
        finally:
            link.close(reason)
            half.close()
    finally:
        await keeper.aclose()


def main(host_command: Sequence[str] = HOST_COMMAND) -> int:
    """Run a core host; returns its exit status."""

    async def serve(orders: CoreOrders | FrontendOrders, parent: Parent) -> None:
        assert isinstance(orders, CoreOrders)
        await serve_core(orders, parent, host_command=host_command)

    return run_child(serve)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
