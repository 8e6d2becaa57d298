"""`repertory top`: a live view of a server in the terminal."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

from cyclopts import Parameter

from ...protocol.errors import ConfigError
from ..observing.logs import configure_logging

_ENDPOINT_HELP = "where Python frontends reach the core, as `repertory serve` prints it: ipc://PATH"
_PERIOD_HELP = "how often to look, in seconds"


def top(
    endpoint: Annotated[str, Parameter(help=_ENDPOINT_HELP)],
    /,
    *,
    every_s: Annotated[float, Parameter(help=_PERIOD_HELP)] = 1.0,
) -> int:
    """Watch a server: its actors and their inboxes, queues, KV cache, shared prefixes and slowest requests.

    `q` ends it, `p` holds the picture still.
    """
    if not endpoint.startswith("ipc://"):
        raise ConfigError(f"endpoint {endpoint!r} is not ipc://PATH", key="endpoint")
    if not 0.05 <= every_s < float("inf"):
        raise ConfigError(f"every_s: {every_s} is not a number of seconds from 0.05 on", key="every_s")
    try:
        from ..observing.top.app import Top
    except ImportError:
        raise ConfigError("`repertory top` needs textual: pip install 'repertory[top]'", key="top") from None
    from ..links.watching import watch

    configure_logging("auto", "error")  # nothing may write over the screen
    asyncio.run(Top(partial(watch, endpoint, period_s=every_s)).run_async())
    return 0
