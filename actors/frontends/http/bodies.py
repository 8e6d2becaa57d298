"""Request bodies: counted while they come in, weighed before they are decoded, decoded off the loop where they are large.

Decoding keeps the interpreter's lock from its beginning to its end, in a thread too. What it costs is the number of
values that it makes more than the bytes of a text: 20 MB of text take 20 to 70 ms, 20 MB of empty lists three seconds. So a
body with more values than any prompt that fits could have is refused for the price of counting, and a prompt whose text is
too long however it is escaped for that of skipping it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec

from ....protocol.errors import NeverFitsError
from .errors import HttpError, bad_request
from .sending import Receive, Scope

MAX_BODY_BYTES = 32 << 20
"""Larger bodies are refused with 413, as soon as they say how large they are or have come to be."""
INLINE_BYTES = 1 << 15
"""Bodies up to this size are decoded where they are: that takes less than handing them to a thread."""
MIN_VALUE_LIMIT = 1 << 18
"""Values that a body may have whatever the model: some ten milliseconds of decoding."""

COUNT_BYTES = 1 << 18
PEEK_BYTES = 1 << 20
"""From this size on a look at the prompt's length comes first."""
MAX_ESCAPED_BYTES = 12
"""Of one character: two escapes, of half a surrogate pair each."""

_SEPARATORS = b",[{"
_PATH = re.compile(r" - at `(?:key in )?`?\$\.?(\w*)")

Body = TypeVar("Body")
_decoding = anyio.CapacityLimiter(1)


class ClientGone(Exception):
    """The client has closed the connection: nobody waits for an answer."""


class _Peek(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"null")


_peek_decoder = msgspec.json.Decoder(_Peek)


async def read_body(scope: Scope, receive: Receive, *, limit: int = MAX_BODY_BYTES) -> bytearray:
    """The request's whole body. Raises `HttpError` 413 above `limit` bytes, `ClientGone` where it breaks off."""
    announced = _content_length(scope["headers"])
    if announced is not None and announced > limit:
        raise _too_large(limit)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")  # grows in place: pieces would be joined all at once at the end
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return body


async def decode_body(body: bytearray, decoder: msgspec.json.Decoder[Body], *, max_characters: int) -> Body:
    """The body as `decoder`'s type. `max_characters` is what the longest prompt may have.

    Raises `HttpError` 400 for what is no JSON or has a field of the wrong type, and `NeverFitsError` for a body with more
    values than a prompt that fits.
    """
    if len(body) <= INLINE_BYTES:
        return _decoded(body, decoder)
    return await anyio.to_thread.run_sync(_weighed, body, decoder, max_characters, limiter=_decoding)


def _weighed(body: bytearray, decoder: msgspec.json.Decoder[Body], max_characters: int) -> Body:
    _check_values(body, max(MIN_VALUE_LIMIT, max_characters))
    if len(body) > PEEK_BYTES and hasattr(decoder.type, "prompt"):
        prompt = memoryview(_decoded(body, _peek_decoder).prompt)
        if prompt[0] == ord('"') and len(prompt) - 2 > MAX_ESCAPED_BYTES * max_characters:
            raise NeverFitsError(f"prompt has {len(prompt) - 2} bytes: no text of this size fits", field="prompt")
    return _decoded(body, decoder)


def _check_values(body: bytearray, most: int) -> None:
    """Separators in texts count too: a text with so many of them does not fit either."""
    found = 0
    # Piece by piece: between two of them other threads have their turn.
    for first in range(0, len(body), COUNT_BYTES):
        found += sum(body.count(separator, first, first + COUNT_BYTES) for separator in _SEPARATORS)
        if found > most:
            raise NeverFitsError(f"the body has more than {most} values or separators: no prompt with so many fits")


def _decoded(body: bytearray, decoder: msgspec.json.Decoder[Body]) -> Body:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_field(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None


def _wrong_field(error: msgspec.ValidationError) -> HttpError:
    found = _PATH.search(str(error))
    field = found.group(1) if found and found.group(1) else None
    reason = str(error).split(" - at `", 1)[0]
    return bad_request(f"{field}: {reason}" if field else f"the body must be a JSON object: {reason}", field)


def _content_length(headers: Sequence[tuple[bytes, bytes]]) -> int | None:
    for name, value in headers:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the request's body may have at most {limit} bytes")
