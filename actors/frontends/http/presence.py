"""Whether somebody still waits for an answer: who hangs up, and who no longer reads, ends the work for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup

from ....protocol.errors import first_of
from .bodies import ClientGone
from .exchange import Exchange

LOOKS_PER_PAUSE = 10
MAX_LOOK_S = 5.0
"""How often a reader is looked after: ten times in the pause that it may make, and every five seconds at least."""


class ReaderStuckError(Exception):
    """The client has taken nothing of its answer for as long as it may pause."""


async def while_present(exchange: Exchange, work: Callable[[], Awaitable[None]], *, max_pause_s: float) -> None:
    """Do `work` for as long as the client is there.

    Raises what it raises; `ClientGone` where the client closed its connection meanwhile; `ReaderStuckError` where it let
    us wait with a part of the answer for `max_pause_s`.
    """
    reason: Exception | None = None

    async def look_after(group: TaskGroup) -> None:
        nonlocal reason
        while reason is None:
            with anyio.move_on_after(min(MAX_LOOK_S, max_pause_s / LOOKS_PER_PAUSE)):
                if (await exchange.receive())["type"] == "http.disconnect":
                    if exchange.is_complete:
                        return
                    reason = ClientGone()
            if exchange.waiting_s >= max_pause_s:
                reason = ReaderStuckError()
        group.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(look_after, group)
            await work()
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        # The first is why the others were cancelled.
        raise first_of(errors) from None
    if reason is not None:
        raise reason
