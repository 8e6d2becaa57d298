"""A run from its JSON logs: what each request's canonical line says, and what was decided about it before.

Lines of others may stand in between, and something before a line's first brace, as what collects logs likes to put there.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

import msgspec

from ....protocol.errors import ValidationError
from ....protocol.ids import RequestId, parse_request_id
from ....protocol.journey import Journey, Leg, Stage
from ....protocol.sampling import FinishReason
from . import words
from .run import Incident, Mark, RequestSeen, Run

ROUNDING_S = 1e-5
"""Seconds in logs are rounded to less than this."""


class _Event(msgspec.Struct):
    event: str
    monotonic_s: float
    timestamp: str | None = None


class _Started(_Event):
    device: str | None = None
    block_size: int = 0
    num_device_blocks: int = 0
    num_host_blocks: int = 0


class _OfRequest(_Event, kw_only=True):
    request_id: str | int


class _Finished(_OfRequest, kw_only=True):
    label: str = ""
    finish_reason: FinishReason = "stop"
    e2e_s: float = 0.0
    ttft_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    legs: list[Leg] = []
    stalled_by: list[tuple[str | int, float]] = []


class _Refused(_OfRequest, kw_only=True):
    label: str = ""


class _Preempted(_OfRequest, kw_only=True):
    mode: str
    num_tokens: int
    num_freed_blocks: int
    swap_s: float
    recompute_s: float
    reason: str


class _HostHit(_OfRequest, kw_only=True):
    fetched: bool
    num_tokens: int
    fetch_s: float
    recompute_s: float


class _Paused(_OfRequest, kw_only=True):
    num_output_tokens: int


class _Lost(_Event):
    reason: str = ""


_KINDS: dict[str, type[_Event]] = {
    "engine.start": _Started,
    "request.finished": _Finished,
    "request.refused": _Refused,
    "scheduler.preempted": _Preempted,
    "scheduler.host_hit": _HostHit,
    "scheduler.paused": _Paused,
    "device.lost": _Lost,
    "device.ready": _Event,
    "device.shared": _Event,
}

_decoder = msgspec.json.Decoder()


def read_run(lines: Iterable[bytes], name: str) -> Run:
    """The run that JSON logs tell of. Raises `ValidationError` where no line is one of ours."""
    reading = _Reading(name)
    for line in lines:
        reading.add(line)
    return reading.end()


class _Reading:
    def __init__(self, name: str) -> None:
        self.run = Run(name=name, source="logs")
        self._num_lines = self._num_foreign = self._num_starts = 0
        self._num_whole = 0
        self._said: dict[RequestId, list[tuple[float, Mark]]] = {}
        """By request: when on the monotonic clock, and a mark without its time."""

    def add(self, line: bytes) -> None:
        """The next line, whoever wrote it."""
        if not line.strip():
            return
        self._num_lines += 1
        fields = _fields(line)
        name = fields.get("event")
        if not isinstance(name, str) or "monotonic_s" not in fields:
            self._num_foreign += 1
            return
        kind = _KINDS.get(name)
        if kind is None:
            return  # ours, and says nothing of a request
        try:
            event = msgspec.convert(fields, kind)
            self._take(event)
        except (msgspec.ValidationError, ValueError):
            self._num_foreign += 1

    def end(self) -> Run:
        """The run. Times began with its first request."""
        run = self.run
        if self._num_lines == self._num_foreign:
            raise ValidationError(
                f"{run.name}: neither a trace (--trace-file) nor JSON logs (--log-format json) of repertory: "
                f"none of its {self._num_lines:,} lines is an event",
                field="file",
                value=run.name,
            )
        if self._num_foreign:
            run.notes.append(
                f"{self._num_foreign:,} of {self._num_lines:,} lines are not events of repertory, and were left out."
            )
        if self._num_starts > 1:
            run.notes.append(
                f"{self._num_starts:,} engines have written to these logs: times of different ones do not compare."
            )
        if run.requests and not self._num_whole:
            run.notes.append("The lines of finished requests have no legs: times are told by three stages only.")
        run.notes.append("Logs have no times of steps and copies; a trace has (--trace-file).")
        self._place()
        return run

    def _place(self) -> None:
        run = self.run
        for request in run.requests:
            marks = self._said.get(request.request_id, [])
            request.marks = [msgspec.structs.replace(mark, at_s=at - request.arrival_s) for at, mark in marks]
        times = [request.arrival_s for request in run.requests] + [incident.at_s for incident in run.incidents]
        origin_s = min(times, default=0.0)
        for request in run.requests:
            request.arrival_s -= origin_s
        run.incidents = [Incident(incident.at_s - origin_s, incident.words) for incident in run.incidents]
        run.requests.sort(key=lambda request: request.arrival_s)
        run.duration_s = max((request.arrival_s + request.e2e_s for request in run.requests), default=0.0)
        if run.wall_s is not None:
            run.wall_s += origin_s

    def _take(self, event: _Event) -> None:
        if self.run.wall_s is None and event.timestamp is not None:
            wall_s = datetime.datetime.fromisoformat(event.timestamp).timestamp()
            self.run.wall_s = wall_s - event.monotonic_s
        match event:
            case _Finished():
                self._finished(event)
            case _Refused():
                self.run.requests.append(
                    RequestSeen(
                        request_id=_id_of(event.request_id),
                        label=event.label,
                        arrival_s=event.monotonic_s,
                        journey=Journey([]),
                        reason="refused",
                    )
                )
            case _Preempted():
                said = words.preempted(
                    event.mode, event.num_tokens, event.num_freed_blocks, event.swap_s, event.recompute_s, event.reason
                )
                self._mark(event, Mark(0.0, "preempted", said))
            case _HostHit():
                said = words.host_hit(event.fetched, event.num_tokens, event.fetch_s, event.recompute_s)
                self._mark(event, Mark(0.0, "host hit", said))
            case _Paused():
                self._mark(event, Mark(0.0, "paused", words.paused(event.num_output_tokens)))
            case _Started():
                self._started(event)
            case _Lost():
                self.run.incidents.append(Incident(event.monotonic_s, f"the device was lost: {event.reason}"))
            case _:
                self.run.incidents.append(Incident(event.monotonic_s, event.event.replace(".", " ")))

    def _mark(self, event: _OfRequest, mark: Mark) -> None:
        self._said.setdefault(_id_of(event.request_id), []).append((event.monotonic_s, mark))

    def _started(self, event: _Started) -> None:
        self._num_starts += 1
        run = self.run
        run.device, run.block_size = event.device, event.block_size
        run.num_device_blocks, run.num_host_blocks = event.num_device_blocks, event.num_host_blocks

    def _finished(self, event: _Finished) -> None:
        self._num_whole += bool(event.legs)
        blamed = [(_id_of(who), seconds) for who, seconds in event.stalled_by]
        self.run.requests.append(
            RequestSeen(
                request_id=_id_of(event.request_id),
                label=event.label,
                arrival_s=event.monotonic_s - event.e2e_s,
                journey=Journey(event.legs or _three_legs(event), blamed),
                reason=event.finish_reason,
                is_derived=not event.legs,
                ttft_s=event.ttft_s,
                num_prompt_tokens=event.num_prompt_tokens,
                num_cached_tokens=event.num_cached_tokens,
                num_output_tokens=event.num_output_tokens,
                num_preemptions=event.num_preemptions,
            )
        )


def _fields(line: bytes) -> dict[str, Any]:
    """The JSON object of a line, or nothing."""
    start = line.find(b"{")
    if start < 0:
        return {}
    try:
        found = _decoder.decode(line[start:])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _id_of(shown: str | int) -> RequestId:
    """The id that a line names. Raises `ValueError` where it is none."""
    return RequestId(shown) if isinstance(shown, int) else parse_request_id(shown)


def _three_legs(event: _Finished) -> list[Leg]:
    """What a line without legs says, as legs. What is left after the last token counts as sending."""
    legs: list[Leg] = []
    at_s = 0.0
    spans: list[tuple[Stage, float | None]] = [
        ("queue", event.queue_s if event.queue_s is not None else event.e2e_s),
        ("prefill", event.prefill_s),
        ("decode", event.decode_s),
    ]
    for stage, seconds in spans:
        if seconds:
            legs.append(Leg(stage, at_s, at_s + seconds))
            at_s += seconds
    if event.e2e_s > at_s + ROUNDING_S:
        legs.append(Leg("send", at_s, event.e2e_s))
    return legs
