"""Work that takes long, in a thread: one line for all of it, so that clients cannot fill the process with threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

_line = anyio.CapacityLimiter(2)


async def off_the_loop(work: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """`work(*arguments)`, in a thread. Cancelled while it stands in line it is not done at all."""
    return await anyio.to_thread.run_sync(_guarded, work, arguments, limiter=_line)


def _guarded(work: Callable[..., Result], arguments: tuple[object, ...]) -> Result:
    try:
        return work(*arguments)
    except Exception:
        raise
    except BaseException as error:
        # A panic of the tokenizer's Rust code is no `Exception`: left alone it would end more than this request.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
