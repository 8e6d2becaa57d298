"""Frontends made of nothing but a socket, which can say anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import zmq
import zmq.asyncio

from repertory import __version__
from repertory.actors.links.codec import FrontendFrame, ToFrontend, decode_from_core, encode
from repertory.protocol.link import Hello, Welcome

MINE = 77
"""The incarnation of such a frontend."""


@asynccontextmanager
async def raw(endpoint: str, kind: int = zmq.DEALER) -> AsyncIterator[zmq.asyncio.Socket]:
    """A socket of ZeroMQ's, without any of ours round it."""
    context = zmq.asyncio.Context()
    try:
        with context.socket(kind) as socket:
            socket.setsockopt(zmq.LINGER, 200)
            socket.connect(endpoint)
            yield socket
    finally:
        context.term()


async def welcomed(socket: zmq.asyncio.Socket, incarnation: int = MINE) -> int:
    """Say hello; the core's epoch."""
    await socket.send(encode(FrontendFrame(0, [Hello(incarnation, __version__)])))
    frame = decode_from_core(await asyncio.wait_for(socket.recv_multipart(), 60))
    assert isinstance(frame.messages[0], Welcome)
    return frame.epoch


async def heard(socket: zmq.asyncio.Socket, kind: type[ToFrontend]) -> Any:
    """The next message of that kind."""
    async with asyncio.timeout(60):
        while True:
            for message in decode_from_core(await socket.recv_multipart()).messages:
                if isinstance(message, kind):
                    return message
