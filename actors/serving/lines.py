"""What the server's process and its children say to each other, as JSON lines over the child's standard input and output.

    parent --CoreOrders, FrontendOrders--> child        (its first line)
    parent --Drain--> frontend                          (finish what runs, then end)
    child  --Ready, Failed, Alive--> parent

The configuration may hold a secret, so it goes this way and not into a command line that others can read.
"""

from __future__ import annotations

import msgspec

from ...protocol.config import EngineConfig
from ...protocol.errors import Problem


class Line(msgspec.Struct, frozen=True, tag=True):
    """Base of all lines."""


class CoreOrders(Line, frozen=True):
    """What a core host is to serve, and where."""

    endpoint: str
    config: EngineConfig


class FrontendOrders(Line, frozen=True):
    """The core that a frontend host belongs to, and the listening socket it shares, as the descriptor it has inherited."""

    endpoint: str
    config: EngineConfig
    socket: int


class Drain(Line, frozen=True):
    """Refuse what is new, finish what runs within so many seconds, and end."""

    timeout_s: float


class Ready(Line, frozen=True):
    """The child serves."""


class Failed(Line, frozen=True):
    """The child ends because of this."""

    problem: Problem


class Alive(Line, frozen=True):
    """The child's loop turns. Sent several times within `heartbeat_timeout_s`."""


ToChild = CoreOrders | FrontendOrders | Drain
ToParent = Ready | Failed | Alive

_encoder = msgspec.json.Encoder()
decode_to_child = msgspec.json.Decoder(ToChild).decode
decode_to_parent = msgspec.json.Decoder(ToParent).decode


def as_line(message: ToChild | ToParent) -> bytes:
    """The message with its line's end."""
    return _encoder.encode(message) + b"\n"
