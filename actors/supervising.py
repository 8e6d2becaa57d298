"""Actors that may crash and be started again."""

from __future__ import annotations

import time
from typing import Protocol

from ..protocol.errors import EngineDeadError
from .devices.budget import RestartBudget
from .mailbox import Load
from .observing.logs import logger

MAX_CRASHES = 5
WINDOW_S = 60.0


class Restartable(Protocol):
    """An actor whose state can be rebuilt from what others keep."""

    async def run(self) -> None:
        """Serve until cancelled."""
        ...

    async def recover(self) -> None:
        """Make the state anew after `run` has raised: no message is lost, and none is handled twice."""
        ...


async def supervised(name: str, actor: Restartable, load: Load | None = None) -> None:
    """Run `actor`, and again after each crash; give up, with `EngineDeadError`, after more than 5 in a minute.

    `load` is told of the restarts.
    """
    budget = RestartBudget(MAX_CRASHES, WINDOW_S)
    while True:
        try:
            await actor.run()
        except Exception as error:
            logger(name).error("actor.failed", reason=repr(error), exc_info=error)
            if budget.on_death(time.monotonic()) is None:
                raise EngineDeadError(f"the {name} crashed {MAX_CRASHES + 1} times in {WINDOW_S:g} s: {error!r}") from error
            if load is not None:
                load.num_restarts += 1
            await actor.recover()
