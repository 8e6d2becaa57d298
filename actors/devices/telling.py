"""Calls from a device's threads to the event loop that waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


def tell(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Call on `loop`, from another thread. A loop that is closed, now or at this very moment, has nobody left to hear it."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)
