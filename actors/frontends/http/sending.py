"""Answers onto the wire: whole ones as JSON, streams as server-sent events. Every `send` waits for the client's socket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

encode = msgspec.json.Encoder().encode
"""One for all: it keeps nothing between calls."""


async def send_json(send: Send, value: Any, *, status: int = 200, headers: Iterable[Header] = ()) -> None:
    """Send `value` as the whole answer."""
    await send_bytes(send, encode(value), status=status, headers=[*headers, JSON])


async def send_bytes(send: Send, body: bytes, *, status: int = 200, headers: Iterable[Header] = ()) -> None:
    """Send a whole answer."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def begin_events(send: Send) -> None:
    """Send the head of an answer that is a stream of events."""
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})


async def send_events(send: Send, events: bytes) -> None:
    """Send events that are framed already."""
    await send({"type": "http.response.body", "body": events, "more_body": True})


async def end_events(send: Send, events: bytes = b"") -> None:
    """Send the last events and end the answer."""
    await send({"type": "http.response.body", "body": events})


def event(value: Any) -> bytes:
    """`value` as one event."""
    return b"data: " + encode(value) + b"\n\n"


EVENT_STREAM: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies shall pass each event on at once
]
JSON: Header = (b"content-type", b"application/json")
METRICS_TEXT: Header = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
DONE = b"data: [DONE]\n\n"
"""What OpenAI's streams end with."""
