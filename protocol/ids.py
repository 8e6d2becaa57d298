"""Identities. Each is a plain integer at run time, so that it hashes and encodes for next to nothing.

A `RequestId` is made by the frontend before anything else happens to a request, and is never
reused: the high half names the frontend's incarnation, the low half counts its requests. The id
a client chooses is a label beside it, and labels may repeat.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from typing import NewType

RequestId = NewType("RequestId", int)
"""(frontend incarnation, counter) packed in 63 bits; unique for the life of the engine."""

SequenceId = NewType("SequenceId", int)
"""One token log with its KV: a request has `n` of them. Counted by the scheduler, never reused."""

BlockId = NewType("BlockId", int)
"""Index of a KV block in the device pool (or in the host pool, where a message says so)."""

StepId = NewType("StepId", int)
"""Number of a step in its device epoch, from 1 upwards. Steps run in this order."""

CopyId = NewType("CopyId", int)
"""Number of a copy in its device epoch, from 1 upwards on each lane. A lane runs its copies in this order."""

Epoch = NewType("Epoch", int)
"""Number of a device host's life. What an earlier life says is dropped."""

_COUNTER_BITS = 32
_INCARNATION_BITS = 31


def request_ids(incarnation: int | None = None) -> Callable[[], RequestId]:
    """Return a function that makes one new `RequestId` per call.

    `incarnation` (31 bits) is drawn at random unless a test gives it.
    """
    if incarnation is None:
        incarnation = new_incarnation()
    high = (incarnation & ((1 << _INCARNATION_BITS) - 1)) << _COUNTER_BITS
    counter = itertools.count(1)
    return lambda: RequestId(high | next(counter))


def new_incarnation() -> int:
    """A number for a new frontend, drawn at random."""
    return secrets.randbits(_INCARNATION_BITS)


def incarnation_of(request_id: RequestId) -> int:
    """Which frontend made the id."""
    return request_id >> _COUNTER_BITS


def show_request_id(request_id: RequestId) -> str:
    """The id as logs print it: incarnation in hex, a dash, the counter."""
    return f"{request_id >> _COUNTER_BITS:08x}-{request_id & ((1 << _COUNTER_BITS) - 1)}"


def parse_request_id(shown: str) -> RequestId:
    """The id that `show_request_id` printed. Raises `ValueError` where it is none."""
    incarnation, _, counter = shown.partition("-")
    return RequestId(int(incarnation, 16) << _COUNTER_BITS | int(counter))
