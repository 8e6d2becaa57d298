"""A bounded, named channel with one reader, and the life of the actor behind it.

An actor is born with its mailbox, is started by a supervisor's task group, handles what comes in
order, one batch at a time, and ends when it is cancelled or its mailbox is closed. A reader takes all
that is there at once, and a sender does not wait unless the box is full. A batch for an idle actor costs
one turn of the loop: each turn is a system call, and a slow one beside kernels that sweep the caches.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import Generic, TypeVar

import anyio

M = TypeVar("M")


class Load:
    """What a mailbox's reader has done so far.

    A turn is a batch, or a wait that ended without one: from there to asking for the next.
    """

    __slots__ = ("handler_s", "num_messages", "num_restarts", "num_turns")

    def __init__(self) -> None:
        self.num_messages = 0
        self.num_turns = 0
        self.handler_s = 0.0
        self.num_restarts = 0


class Mailbox(Generic[M]):
    """Messages to one actor, at most `bound` of them unread. Once closed, its methods raise `anyio.ClosedResourceError`."""

    def __init__(self, name: str, bound: int) -> None:
        self.name = name
        self.bound = bound
        self._unread: deque[M] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._senders: deque[tuple[asyncio.Future[None], M]] = deque()
        self._is_closed = False
        self.load = Load()
        self._taken_s: float | None = None

    def __len__(self) -> int:
        return len(self._unread)

    @property
    def num_senders(self) -> int:
        """Senders that wait for room."""
        return len(self._senders)

    def post_nowait(self, message: M) -> bool:
        """Put a message in; False, and nothing done, when the box is full."""
        if self._is_closed:
            raise anyio.ClosedResourceError
        if len(self._unread) >= self.bound:
            return False
        self._unread.append(message)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        return True

    async def post(self, message: M) -> None:
        """Put a message in, waiting for room if the box is full; who waited longest comes first."""
        if self.post_nowait(message):
            return
        entry = asyncio.get_running_loop().create_future(), message
        self._senders.append(entry)
        try:
            await entry[0]
        except asyncio.CancelledError:
            if entry in self._senders:  # else it has been taken
                self._senders.remove(entry)
            raise

    async def take(self, *, timeout_s: float = math.inf) -> list[M]:
        """Wait for a message, then return all that are there, and those of senders that wait for room.

        Empty after `timeout_s` seconds without one. Others have a turn in any case.
        """
        if self._is_closed:
            raise anyio.ClosedResourceError
        if self._reader is not None:
            raise RuntimeError(f"two tasks read the mailbox {self.name}")
        if self._taken_s is not None:
            self.load.handler_s += time.monotonic() - self._taken_s
            self._taken_s = None
        if self._unread:
            await asyncio.sleep(0)
        else:
            await self._news(timeout_s)
        batch = list(self._unread)
        self._unread.clear()
        while self._senders:
            sender, message = self._senders.popleft()
            batch.append(message)
            _wake(sender)
        self.load.num_turns += 1
        self.load.num_messages += len(batch)
        self._taken_s = time.monotonic()
        return batch

    async def _news(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        reader = self._reader = loop.create_future()
        timer = None if timeout_s == math.inf else loop.call_later(timeout_s, _wake, reader)
        try:
            await reader
        finally:
            self._reader = None
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """No more messages. What is unread is dropped; who waits is told."""
        self._is_closed = True
        self._unread.clear()
        waiting = [sender for sender, _ in self._senders]
        self._senders.clear()
        for waiter in (*waiting, *([self._reader] if self._reader is not None else [])):
            if not waiter.done():
                waiter.set_exception(anyio.ClosedResourceError())


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
