"""Traces written by hand: what happened, line by line, with times in seconds from the beginning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from repertory.protocol import trace
from repertory.protocol.capacity import Capacity
from repertory.protocol.ids import RequestId, request_ids
from repertory.protocol.journey import Journey, Leg

CLOCK_S = 5_000.0
"""The monotonic clock at the beginning."""
WALL_S = 1_700_000_000.0
HIGH = 0x4C8E288B
FIRST = request_ids(HIGH)()


def request_id(number: int) -> RequestId:
    """The id of the `number`th request, from 1 upwards; logs print 4c8e288b-`number`."""
    return RequestId(FIRST + number - 1)


class WrittenTrace:
    """Records in the order in which its methods are called."""

    def __init__(self, *, num_device_blocks: int = 100, num_host_blocks: int = 40) -> None:
        capacity = Capacity("written by hand", num_device_blocks, num_host_blocks, 16, 1000, 64, 4096)
        self.records: list[trace.Record] = [
            trace.Began(
                version=trace.TRACE_VERSION, engine="0.0", config={}, capacity=capacity, epoch=1, at=CLOCK_S, wall_s=WALL_S
            )
        ]
        self._num_steps = 0

    def add(self, kind: type[trace.Record], at: float, **fields: Any) -> WrittenTrace:
        """A record of any kind."""
        self.records.append(kind(at=CLOCK_S + at, **fields))
        return self

    def arrived(
        self, number: int, at: float, *, label: str | None = None, seq_id: int | None = None, n: int = 1
    ) -> WrittenTrace:
        """A request came; its sequence has its number unless told otherwise."""
        return self.add(
            trace.Arrived,
            at + 0.001,
            request_id=request_id(number),
            label=f"job-{number}" if label is None else label,
            arrival_s=CLOCK_S + at,
            num_prompt_tokens=64,
            seq_id=number if seq_id is None else seq_id,
            n=n,
        )

    def step(self, at: float, seconds: float, *, took: float | None = None, ends: bool = True, **fields: Any) -> WrittenTrace:
        """A step that was planned at `at`, began at once and ended `seconds` later; see `trace.Planned`."""
        self._num_steps += 1
        fields = {"num_free": 40, "num_cached": 30, "num_running": 2, "predicted_s": seconds, **fields}
        self.add(trace.Planned, at, step_id=self._num_steps, epoch=1, **fields)
        if ends:
            took = seconds if took is None else took
            self.add(trace.StepEnded, at + seconds, step_id=self._num_steps, epoch=1, seconds=took)
        return self

    def travelled(self, number: int, at: float, legs: list[tuple[Any, ...]], **fields: Any) -> WrittenTrace:
        """A request that came at `at` is over; legs are (stage, seconds[, seconds stalled]) one after another."""
        made, passed = [], 0.0
        for stage, seconds, *stalled in legs:
            made.append(Leg(stage, passed, passed + seconds, *stalled))
            passed += seconds
        blamed = [(request_id(who), seconds) for who, seconds in fields.pop("stalled_by", [])]
        fields = {"label": f"job-{number}", "reason": "length", **fields}
        return self.add(
            trace.Travelled,
            at + passed,
            request_id=request_id(number),
            arrival_s=CLOCK_S + at,
            journey=Journey(made, blamed),
            **fields,
        )

    def ended(self, number: int, at: float, *, reason: str | None = "length", index: int = 0, tokens: int = 8) -> WrittenTrace:
        """A sequence ended."""
        return self.add(trace.Ended, at, request_id=request_id(number), index=index, reason=reason, num_output_tokens=tokens)

    def finished(self, at: float) -> WrittenTrace:
        """The trace ends in order."""
        return self.add(trace.Finished, at, reason="closed", digest="")

    def lines(self) -> list[bytes]:
        """As they lie in a file."""
        return [msgspec.json.encode(record) + b"\n" for record in self.records]

    def write(self, path: Path) -> Path:
        """Write the file."""
        path.write_bytes(b"".join(self.lines()))
        return path


def pressed() -> WrittenTrace:
    """A run with everything in it: stalls with names, a swap, a fetch, a pause, an abort, a refusal, a lost device."""
    written = WrittenTrace()
    written.arrived(1, 0.0).arrived(2, 0.01).arrived(3, 0.02).arrived(4, 0.03).arrived(5, 0.04, seq_id=0)
    written.step(0.05, 0.02, chunks=[(1, 0, 64, 1), (2, 0, 32, 0)], load=(96, 5000, 2), admitted=[1, 2])
    written.step(
        0.08, 0.04, decodes=[1], chunks=[(2, 32, 32, 1), (3, 0, 96, 0)], load=(128, 9000, 3), admitted=[3], num_waiting=1
    )
    written.step(0.13, 0.012, decodes=[1, 2], load=(0, 200, 2), num_free=2, num_cached=8, num_host_used=10)
    written.add(
        trace.Preempted, 0.15, request_id=request_id(1), mode="swap", num_tokens=70, num_freed_blocks=5,
        swap_s=0.003, recompute_s=0.009, reason="cheaper",
    )  # fmt: skip
    written.add(trace.CopySent, 0.15, copy_id=1, direction="out", num_blocks=5)
    written.add(trace.CopyEnded, 0.155, copy_id=1, epoch=1, direction="out", num_bytes=5000, seconds=0.004)
    written.step(0.16, 0.02, decodes=[2], load=(0, 200, 1), num_preempted=1, num_host_used=15)
    written.add(trace.Fetched, 0.19, request_id=request_id(1), fetched=True, num_tokens=64, fetch_s=0.002, recompute_s=0.008)
    written.add(trace.CopySent, 0.19, copy_id=1, direction="in", num_blocks=4)
    written.add(trace.CopyEnded, 0.2, copy_id=1, epoch=1, direction="in", num_bytes=4000, seconds=0.005, ok=False)
    written.add(trace.Paused, 0.2, request_id=request_id(2), num_output_tokens=3)
    written.add(trace.Aborted, 0.21, request_id=request_id(4))
    written.add(trace.DeviceEvent, 0.22, what="lost", epoch=1).add(trace.DeviceEvent, 0.3, what="ready", epoch=2)
    written.travelled(
        1, 0.0,
        [
            ("tokenise", 0.001), ("queue", 0.049), ("prefill", 0.02), ("decode", 0.08, 0.035), ("preempted", 0.04),
            ("decode", 0.2, 0.01),
        ],
        stalled_by=[(3, 0.03), (2, 0.015)], num_preemptions=1, num_prompt_tokens=64, num_cached_tokens=16, num_output_tokens=9,
    )  # fmt: skip
    written.travelled(2, 0.01, [("queue", 0.05), ("prefill", 0.06), ("decode", 0.08), ("paused", 0.3)], reason="stop")
    written.travelled(3, 0.02, [("blocks", 0.06), ("prefill", 0.03), ("restart", 0.2)], reason="error")
    written.travelled(4, 0.03, [("queue", 0.18)], reason="abort")
    return written.finished(0.5)
