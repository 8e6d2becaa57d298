"""What travels between the core and a device host, and how: tagged structs as msgpack, and nothing else.

A frame is decoded as plain data against a fixed schema; what does not fit is an error here, never code.
"""

from __future__ import annotations

import msgspec

from ...protocol.messages import DeviceOpened, Heartbeat, OpenDevice, OpeningFailed, RunStep, StepDone, StepFailed

ToHost = OpenDevice | RunStep
FromHost = DeviceOpened | OpeningFailed | Heartbeat | StepDone | StepFailed

encode = msgspec.msgpack.Encoder().encode
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode
decode_from_host = msgspec.msgpack.Decoder(FromHost).decode
