"""Somebody else's loop: notice when it is blocked, and say what to do."""

from __future__ import annotations

import time

import anyio

from .observing.logs import logger

LAG_S = 0.05
PERIOD_S = 0.1
QUIET_S = 10.0
"""At most one warning in this time."""


HINT = "something blocks this event loop: run the engine in a process of its own, or use LLM"
"""For an application that embeds an engine."""


async def watch_loop(hint: str = HINT) -> None:
    """Measure how late the event loop wakes this task; log `loop.lag` above 50 ms. Runs until cancelled."""
    log = logger("engine")
    said_at = float("-inf")
    while True:
        before = time.monotonic()
        await anyio.sleep(PERIOD_S)
        now = time.monotonic()
        lag_s = now - before - PERIOD_S
        if lag_s > LAG_S and now - said_at > QUIET_S:
            said_at = now
            log.warning("loop.lag", lag_s=round(lag_s, 3), hint=hint)
