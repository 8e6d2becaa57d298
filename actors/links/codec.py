"""What travels between frontends and the core, and how: tagged structs as msgpack, and nothing else.

A frame is decoded as plain data against a fixed schema; what does not fit is an error here, never code.
"""

from __future__ import annotations

import msgspec

from ...protocol.link import Answer, Beat, Dismissed, Goodbye, Hello, Question, Welcome
from ...protocol.messages import Abort, Admit, Closed, Columns, Credit, Refused, Resend, TokensSampled

ToCore = Hello | Beat | Goodbye | Question | Admit | Abort | Credit | Resend | Closed
ToFrontend = Welcome | Beat | Dismissed | Answer | TokensSampled | Refused


class FrontendFrame(Columns, frozen=True):
    """What a frontend says to the core of `epoch` (0: whichever there is)."""

    epoch: int
    messages: list[ToCore]


class CoreFrame(Columns, frozen=True):
    """What the core of `epoch` says to a frontend."""

    epoch: int
    messages: list[ToFrontend]


class BadFrame(ValueError):
    """Bytes that are no frame."""


encode = msgspec.msgpack.Encoder().encode
_from_frontend = msgspec.msgpack.Decoder(FrontendFrame)
_from_core = msgspec.msgpack.Decoder(CoreFrame)

_NOT_DATA = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)
"""What decoding raises; text that is not UTF-8 and data nested without end are not the library's own errors."""


def decode_from_frontend(parts: list[bytes]) -> FrontendFrame:
    """The frame in one part. Raises `BadFrame`."""
    if len(parts) != 1:
        raise BadFrame(f"a frame of {len(parts)} parts")
    try:
        return _from_frontend.decode(parts[0])
    except _NOT_DATA as error:
        raise BadFrame(str(error)) from None


def decode_from_core(parts: list[bytes]) -> CoreFrame:
    """The frame in one part. Raises `BadFrame`."""
    if len(parts) != 1:
        raise BadFrame(f"a frame of {len(parts)} parts")
    try:
        return _from_core.decode(parts[0])
    except _NOT_DATA as error:
        raise BadFrame(str(error)) from None
