"""The link's messages survive the way, and nothing else gets through."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from repertory.actors.devices.codec import LaneFailed, decode_from_host, decode_to_host, encode, in_words
from repertory.protocol.errors import Problem
from repertory.protocol.messages import CopyBlocks, CopyDone, Fences, RunStep, StepDone, StepFailed

PROBLEM = Problem("RequestFailedError", "OSError: gone")


@pytest.mark.parametrize(
    "message",
    [
        CopyBlocks(3, 1 << 40, "out", Fences(7, 8, 9), [1, 2, 3], [4, 5, 6]),  # type: ignore[arg-type]
        CopyBlocks(3, 1, "in", Fences(), [], []),  # type: ignore[arg-type]
        RunStep(3, 4, Fences(3, 2, 1), [1], [0], [5], [1]),  # type: ignore[arg-type]
    ],
)
def test_what_is_sent_to_a_host_arrives_as_it_was(message: Any) -> None:
    assert decode_to_host(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        CopyDone(3, 7, "in", 1 << 33, 0.5),  # type: ignore[arg-type]
        CopyDone(3, 7, "out", 0, 0.5, 1.5, ok=False, reason="no room"),  # type: ignore[arg-type]
        StepDone(3, 4, [1], [2], 0.25, waited_s=0.125),  # type: ignore[arg-type]
        LaneFailed(3, 7, "out", PROBLEM),  # type: ignore[arg-type]
    ],
)
def test_what_a_host_says_arrives_as_it_was(message: Any) -> None:
    assert decode_from_host(encode(message)) == message


def test_a_direction_there_is_not_is_no_message() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_to_host(encode(CopyBlocks(3, 1, "up", Fences(), [], [])))  # type: ignore[arg-type]


def test_answers_are_not_taken_for_work() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_to_host(encode(CopyDone(3, 7, "in", 0, 0.5)))  # type: ignore[arg-type]


def test_a_failure_says_what_failed() -> None:
    assert in_words(StepFailed(3, 4, PROBLEM)) == "step 4 failed: OSError: gone"  # type: ignore[arg-type]
    assert in_words(LaneFailed(3, 7, "in", PROBLEM)) == "copy in 7 failed: OSError: gone"  # type: ignore[arg-type]
