"""One request over HTTP and the answer to it: who asks, what has been sent, and whether anybody reads it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import MutableMapping
from typing import Any

from ....protocol.errors import shorten
from ...resolving import MAX_LABEL_CHARACTERS
from .errors import HttpError, bad_request
from .sending import Receive, Scope, Send, end_events, event, send_json

KEY = "repertory.exchange"
"""Where the scope carries it."""


class Exchange:
    """Made for each request. `send` is the connection's, with the request's id in the head of the answer.

    `request_id` is the client's `X-Request-Id`, or one of ours; the body may name another (`call_it`).
    Raises `HttpError` 400 for an id that is too long.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.has_begun = False
        """Whether the head of the answer has been sent: from then on it is a stream, or over."""
        self.is_complete = False
        """Whether all of the answer is with the server: a connection that closes then has done its work."""
        self._send = send
        self._sending_since: float | None = None
        self._loop = asyncio.get_running_loop()
        given = self.header(b"x-request-id")
        self.is_named = bool(given)
        self.request_id = checked_id(given or uuid.uuid4().hex)

    def header(self, name: bytes) -> str | None:
        """A request header (`name` in lower case); None where there is none."""
        for key, value in self.scope["headers"]:
            if key == name:
                return str(value.decode("latin-1"))
        return None

    def call_it(self, request_id: str | None) -> None:
        """The body's id for the request: it counts where the header names none."""
        if request_id and not self.is_named:
            self.request_id = checked_id(request_id)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of the answer; waits while the client's socket is full."""
        if not self.has_begun:
            self.has_begun = True
            message["headers"] = [*message["headers"], (b"x-request-id", _as_header(self.request_id))]
        elif not message.get("more_body", False):
            self.is_complete = True
        self._sending_since = self._loop.time()
        await self._send(message)
        self._sending_since = None

    @property
    def waiting_s(self) -> float:
        """How long the client has let us wait with what is being sent now."""
        return 0.0 if self._sending_since is None else self._loop.time() - self._sending_since

    async def fail(self, error: HttpError) -> None:
        """Answer with an error: as JSON, or where a stream has begun as its last event. Too late, nothing is sent."""
        if self.is_complete:
            return
        if self.has_begun:
            await end_events(self.send, event(error.body()))
            return
        headers = [] if error.retry_after_s is None else [(b"retry-after", str(error.retry_after_s).encode())]
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send_json(self.send, error.body(), status=error.status, headers=headers)

    async def hang_up(self) -> None:
        """Break the connection off, whatever it still holds: nobody reads it. Some servers have no way to."""
        hang_up = self.scope.get("extensions", {}).get("repertory.hang_up")
        if hang_up is not None:
            hang_up["call"]()
            while (await self.receive())["type"] != "http.disconnect":
                pass  # until the server knows: else it complains of an answer without an end


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that a scope belongs to."""
    found: Exchange = scope[KEY]
    return found


def checked_id(request_id: str) -> str:
    """A client's id for its request, as long as it may be."""
    if len(request_id) > MAX_LABEL_CHARACTERS:
        raise bad_request(
            f"request_id must be text of at most {MAX_LABEL_CHARACTERS} characters, got {shorten(request_id)}", "request_id"
        )
    return request_id


def _as_header(request_id: str) -> bytes:
    """What a header can hold of an id: a body's may have line breaks, or characters that no header has."""
    return request_id.encode("latin-1", errors="replace").translate(_PRINTABLE)


_PRINTABLE = bytes(byte if 32 <= byte != 127 else ord("?") for byte in range(256))
