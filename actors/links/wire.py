"""One end of a link: a ZeroMQ socket that is read in slices, judged fairly and written without waiting.

ZeroMQ's own limits are off for what is sent, since it counts messages and makes the sender of one wait for the reader
of another. Instead each side says in its heartbeats how many bytes it has taken in, and the sender knows what is unread
(`Account`), wherever it lies: in ZeroMQ's queues, the kernel's, or the reader's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio

from ...protocol.config import EngineConfig

MAX_FRAME_BYTES = 64 << 20
"""A longer one ends its connection."""
MAX_UNREAD_BYTES = 32 << 20
"""What one side may leave unread."""
REPORT_BYTES = 1 << 20
"""After so many bytes a reader reports without waiting for its next heartbeat."""
LOOK_S = 0.1
"""How often life signs are judged."""
SLICE = 64
"""Frames that are read before others of the loop have a turn."""

_HEARTBEATS_PER_TIMEOUT = 5
_LONGEST_HEARTBEAT_S = 1.0


def heartbeat_period_s(config: EngineConfig) -> float:
    """How often both sides say that they are alive."""
    return min(_LONGEST_HEARTBEAT_S, config.heartbeat_timeout_s / _HEARTBEATS_PER_TIMEOUT)


class Account:
    """Bytes of one link, both ways: what we sent and they have not read, what we have read and not said so."""

    def __init__(self) -> None:
        self._num_sent = 0
        self._num_read_there = 0
        self.num_taken = 0
        self._num_reported = 0

    @property
    def num_unread(self) -> int:
        """Sent and not read there, as far as we know."""
        return self._num_sent - self._num_read_there

    @property
    def is_report_due(self) -> bool:
        """Whether the other side should hear before the next heartbeat how much we have read."""
        return self.num_taken - self._num_reported >= REPORT_BYTES

    def sent(self, num_bytes: int) -> None:
        """A frame has gone out."""
        self._num_sent += num_bytes

    def taken(self, num_bytes: int) -> None:
        """A frame has been taken in."""
        self.num_taken += num_bytes

    def reported(self) -> None:
        """The other side has been told of `num_taken`."""
        self._num_reported = self.num_taken

    def read_there(self, num_bytes: int) -> None:
        """What the other side says that it has taken in since the link began; never more than was sent."""
        self._num_read_there = min(self._num_sent, max(self._num_read_there, num_bytes))


class Wire:
    """A socket. One task listens; anybody sends."""

    def __init__(self, context: zmq.asyncio.Context, kind: int) -> None:
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._drained_at = time.monotonic()

    def send(self, parts: list[bytes]) -> bool:
        """Queue a message at once; False where its receiver is gone."""
        sent = asyncio.ensure_future(self.socket.send_multipart(parts))  # a future already, whatever its annotation says
        if not sent.done():
            sent.add_done_callback(_forget_failure)
            return True
        return sent.exception() is None

    async def listen(self, handle: Callable[[list[bytes]], Awaitable[None]]) -> None:
        """Hand each message to `handle`, until cancelled."""
        while True:
            parts: list[bytes] | None = await self.socket.recv_multipart()
            num_read = 0
            while parts is not None:
                await handle(parts)
                num_read += 1
                if num_read % SLICE == 0:
                    await asyncio.sleep(0)
                parts = await self._next()
            self._drained_at = time.monotonic()

    @property
    def has_unread(self) -> bool:
        """Whether something has come that nobody has read."""
        # Not `poll`: it takes the socket's event from whoever waits in `recv`, who then sleeps beside a full socket.
        events = self.socket.get(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & zmq.POLLIN)

    def heard_until(self) -> float:
        """The time up to which everything that has come is heard: silence is judged only before it."""
        return self._drained_at if self.has_unread else time.monotonic()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what is queued may take `linger_ms` to leave."""
        self.socket.close(linger=linger_ms)

    async def _next(self) -> list[bytes] | None:
        with contextlib.suppress(zmq.Again):
            found: list[bytes] = await self.socket.recv_multipart(zmq.NOBLOCK)
            return found
        return None


def _forget_failure(sent: asyncio.Future[zmq.MessageTracker | None]) -> None:
    """A message to somebody who is gone: that is noticed elsewhere."""
    if not sent.cancelled():
        sent.exception()
