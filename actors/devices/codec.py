"""What travels between the core and a device host, and how: tagged structs as msgpack, and nothing else.

A frame is decoded as plain data against a fixed schema; what does not fit is an error here, never code.
"""

from __future__ import annotations

import msgspec

from ...protocol.errors import Problem
from ...protocol.ids import CopyId, Epoch
from ...protocol.messages import (
    CopyBlocks,
    CopyDirection,
    CopyDone,
    DeviceOpened,
    DeviceShared,
    Heartbeat,
    Message,
    OpenDevice,
    OpeningFailed,
    RunStep,
    StepDone,
    StepFailed,
)


class LaneFailed(Message, frozen=True):
    """A copy raised instead of failing: the device's state is not to be trusted any more and its epoch ends."""

    epoch: Epoch
    copy_id: CopyId
    direction: CopyDirection
    problem: Problem


ToHost = OpenDevice | RunStep | CopyBlocks
FromHost = DeviceOpened | OpeningFailed | Heartbeat | StepDone | CopyDone | DeviceShared | StepFailed | LaneFailed

encode = msgspec.msgpack.Encoder().encode
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode
decode_from_host = msgspec.msgpack.Decoder(FromHost).decode


def in_words(failure: StepFailed | LaneFailed) -> str:
    """Why the device is lost."""
    if isinstance(failure, StepFailed):
        return f"step {failure.step_id} failed: {failure.problem.message}"
    return f"copy {failure.direction} {failure.copy_id} failed: {failure.problem.message}"
