"""Everything that may be said on the link survives it; everything else is an error, and only that."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repertory.actors.links.codec import BadFrame, CoreFrame, FrontendFrame, decode_from_core, decode_from_frontend, encode
from repertory.protocol.capacity import Capacity
from repertory.protocol.config import EngineConfig
from repertory.protocol.errors import Problem
from repertory.protocol.ids import RequestId
from repertory.protocol.link import (
    AuditAnswer,
    AuditAsked,
    Beat,
    Dismissed,
    Done,
    DrainAsked,
    Goodbye,
    Hello,
    ResetAsked,
    StatsAnswer,
    StatsAsked,
    Welcome,
    without_secrets,
)
from repertory.protocol.messages import (
    Abort,
    Admit,
    Barred,
    Closed,
    Credit,
    Open,
    Refused,
    Resend,
    SequenceEnd,
    TokenLogprobs,
    TokensSampled,
)
from repertory.protocol.outputs import BlockCounts, EngineStats
from repertory.protocol.sampling import SamplingParams
from repertory.protocol.structured import StructuredOutputs

ID = RequestId(7 << 32 | 1)
PARAMS = SamplingParams(
    n=2,
    stop=["a", "b"],
    logit_bias={5: 1.5},
    bad_words=["x"],
    seed=-1,
    max_tokens=None,
    structured_outputs=StructuredOutputs(json={"type": "object"}),
)
COUNTS = BlockCounts(4, 1, 2, 1)
STATS = EngineStats(
    num_running=1,
    num_waiting=2,
    num_preempted=0,
    device_blocks=COUNTS,
    host_blocks=COUNTS,
    prefix_cache_queries=5,
    prefix_cache_hits=3,
    num_preemptions={"swap": 1},
    swap_out_bytes=1,
    swap_in_bytes=2,
    num_steps=3,
    num_restarts=0,
)
TO_CORE = [
    Hello(7, "1.2.3"),
    Beat(2**40),
    Goodbye(),
    StatsAsked(1),
    AuditAsked(2),
    ResetAsked(3),
    DrainAsked(4, None),
    DrainAsked(4, 0.5),
    Admit(ID, "label", [1, 2], PARAMS, 1.5, [2], -3, "tenant", "salt", {"traceparent": "00"}, True, ID, Barred([1], [[2, 3]])),
    Abort(ID, "stop", 3),
    Credit(ID, 256, 1),
    Resend(ID),
    Closed([ID, ID]),
]
TO_FRONTEND = [
    Welcome(EngineConfig(model="m"), Capacity("cpu", 9, 0, 4, 1, 320, 64), "/m"),
    Beat(0),
    Dismissed("why"),
    StatsAnswer(1, STATS),
    AuditAnswer(2, ["it is wrong"]),
    Done(3, False),
    Refused(ID, Problem("QueueFullError", "full", "f")),
    TokensSampled(
        [ID],
        [5],
        1.5,
        [Open(ID, [1], PARAMS, 2, 1, 0.5, 0.75)],
        [SequenceEnd(ID, "error", None, Problem("RequestFailedError", "x"), 2, -1)],
        [(ID, 1)],
        [1],
        [TokenLogprobs([5, 6], [-0.5, -math.inf], 1)],
    ),
]


def test_what_frontends_say_arrives_as_it_was_said() -> None:
    frame = FrontendFrame(5, TO_CORE)
    assert decode_from_frontend([encode(frame)]) == frame


def test_what_the_core_says_arrives_as_it_was_said() -> None:
    frame = CoreFrame(5, TO_FRONTEND)
    assert decode_from_core([encode(frame)]) == frame


@pytest.mark.parametrize("decode", [decode_from_core, decode_from_frontend])
@given(
    data=st.one_of(
        st.binary(max_size=200),
        st.recursive(st.none() | st.integers(-(2**63), 2**63) | st.text(), st.lists).map(msgspec.msgpack.encode),
    )
)
def test_any_bytes_are_a_frame_or_an_error_of_one_kind(decode: object, data: bytes) -> None:
    try:
        decode([data])  # type: ignore[operator]
    except BadFrame:
        return


@given(data=st.data())
def test_a_frame_with_some_bytes_changed_is_a_frame_or_an_error_of_one_kind(data: st.DataObject) -> None:
    frame = bytearray(encode(FrontendFrame(5, TO_CORE)))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_from_frontend([bytes(frame)])
    except BadFrame:
        return


@pytest.mark.parametrize("parts", [[], [b"", b""], [b"\xa1\xff"], [b"\x92\x01" + b"\x91" * 5000]])
def test_what_is_not_one_part_of_data_is_refused(parts: list[bytes]) -> None:
    for decode in (decode_from_core, decode_from_frontend):
        with pytest.raises(BadFrame):
            decode(parts)


@pytest.mark.parametrize("timeout_s", [math.nan, -1.0, "1"])
def test_a_time_that_would_disturb_a_clock_is_no_message(timeout_s: object) -> None:
    frame = msgspec.msgpack.encode([5, [["DrainAsked", 1, timeout_s]]])
    with pytest.raises(BadFrame):
        decode_from_frontend([frame])


def test_neither_side_says_what_is_the_others_to_say() -> None:
    for message in (Welcome, TokensSampled, Dismissed):
        said = next(one for one in TO_FRONTEND if isinstance(one, message))
        with pytest.raises(BadFrame):
            decode_from_frontend([encode(CoreFrame(5, [said]))])
    for said in TO_CORE:
        if not isinstance(said, Beat):
            with pytest.raises(BadFrame):
                decode_from_core([encode(FrontendFrame(5, [said]))])


def test_a_configuration_travels_without_its_secrets() -> None:
    config = EngineConfig(model="m", api_key="secret", port=9)
    assert b"secret" not in encode(CoreFrame(5, [Welcome(without_secrets(config), TO_FRONTEND[0].capacity, "/m")]))
    assert without_secrets(config).port == 9
