"""Looking at a core without being a frontend that asks it for anything: no tokenizer, no model, no requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import anyio

from ...protocol.errors import EngineDeadError
from ...protocol.ids import new_incarnation
from ...protocol.link import ViewAnswer, ViewAsked
from ...protocol.messages import Refused, TokensSampled
from ...protocol.view import CompanyView
from ..mailbox import Mailbox
from ..scheduler import SchedulerInbox
from .frontend_link import FrontendLink, LookError

GREETING_S = 5.0
RETRY_S = 0.5


async def watch(endpoint: str, show: Callable[[CompanyView | str], None], *, period_s: float = 1.0) -> NoReturn:
    """Show a view every `period_s` seconds, or in words why there is none, and look for the next core when one goes."""
    while True:
        link = FrontendLink(endpoint, new_incarnation())
        try:
            reason = await _watch(link, show, period_s)
        except EngineDeadError as error:
            reason = str(error)
        finally:
            with anyio.CancelScope(shield=True):
                await link.aclose()
        show(reason)
        await anyio.sleep(RETRY_S)


async def _watch(link: FrontendLink, show: Callable[[CompanyView | str], None], period_s: float) -> str:
    """Until the core is lost; returns why."""
    outbox: Mailbox[SchedulerInbox] = Mailbox("link", 1)
    samples: Mailbox[TokensSampled | Refused] = Mailbox("detokenizer", 1)
    with anyio.move_on_after(GREETING_S):
        await link.greet()
    if not link.is_welcome:
        return f"no core answers at {link.endpoint}"
    async with anyio.create_task_group() as group:
        group.start_soon(_look, link, show, period_s)
        reason = await link.run(outbox, samples)
        group.cancel_scope.cancel()
    return f"the core is lost: {reason}"


async def _look(link: FrontendLink, show: Callable[[CompanyView | str], None], period_s: float) -> None:
    while True:
        try:
            answer = await link.ask(ViewAsked)
        except (EngineDeadError, LookError) as error:
            show(str(error))
        else:
            assert isinstance(answer, ViewAnswer)
            show(answer.view)
        await anyio.sleep(period_s)
