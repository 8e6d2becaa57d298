"""A run in the trace-event format that ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" (Google, 2016), JSON object form. Two processes: the engine, with a track for the steps,
one for each copy lane and the counters; and the requests, a track each: the whole of it, its legs nested within.
Times are microseconds since the run's first record, with three digits, so that what nests in nanoseconds nests here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

import msgspec

from ...protocol.ids import RequestId
from ...protocol.journey import Leg
from .runs import words
from .runs.run import CopySeen, RequestSeen, Run, StepSeen

Event = dict[str, Any]

ENGINE, REQUESTS = 1, 2
STEPS, LANE_OUT, LANE_IN = 1, 2, 3
_LANES = {"out": LANE_OUT, "in": LANE_IN}


def write(run: Run, out: TextIO) -> int:
    """Write `run` as one JSON object, an event a line; return the number of events."""
    heading = {"name": run.name, "engine": run.engine, "device": run.device, "began_s": run.wall_s, "notes": run.notes}
    out.write(f'{{"displayTimeUnit":"ms","otherData":{msgspec.json.encode(heading).decode()},"traceEvents":[')
    count = 0
    for count, event in enumerate(events(run), start=1):
        out.write(",\n" if count > 1 else "\n")
        out.write(msgspec.json.encode(event).decode())
    out.write("\n]}\n")
    return count


def events(run: Run) -> list[Event]:
    """All events: names of tracks first, then by time, what contains before what is contained."""
    timed = [*_steps(run.steps), *_copies(run.copies), *_counters(run), *_incidents(run)]
    names = run.names()
    for number, request in enumerate(run.requests, start=1):
        timed += _request(request, number, names)
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return [*_names(run, names), *timed]


def _names(run: Run, names: Mapping[RequestId, str]) -> Iterator[Event]:
    yield _name("process_name", ENGINE, 0, f"engine: {run.device or run.name}")
    yield _name("process_name", REQUESTS, 0, "requests")
    for track, words_of in ((STEPS, "steps"), (LANE_OUT, "lane out (device to host)"), (LANE_IN, "lane in (host to device)")):
        yield _name("thread_name", ENGINE, track, words_of)
        yield _sorted(ENGINE, track)
    for number, request in enumerate(run.requests, start=1):
        yield _name("thread_name", REQUESTS, number, names[request.request_id])
        yield _sorted(REQUESTS, number)


def _name(what: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _sorted(process: int, track: int) -> Event:
    return {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": track, "args": {"sort_index": track}}


def _steps(steps: Iterable[StepSeen]) -> Iterator[Event]:
    for step in steps:
        if step.start_s is None:
            continue
        name = "prefill" if not step.num_decodes else "decode" if not step.num_prefill_tokens else "prefill + decode"
        facts = {
            "step_id": step.step_id,
            "epoch": step.epoch,
            "prefill_tokens": step.num_prefill_tokens,
            "decodes": step.num_decodes,
            "predicted_ms": None if step.predicted_s is None else round(step.predicted_s * 1e3, 3),
            "waited_ms": round(step.waited_s * 1e3, 3),
        }
        yield _slice(name, "step", ENGINE, STEPS, step.start_s, step.end_s, facts)


def _copies(copies: Iterable[CopySeen]) -> Iterator[Event]:
    for copy in copies:
        facts = {"copy_id": copy.copy_id, "bytes": copy.num_bytes, "waited_ms": round(copy.waited_s * 1e3, 3), "ok": copy.ok}
        name = f"copy {copy.direction}" if copy.ok else f"copy {copy.direction} failed"
        yield _slice(name, "copy", ENGINE, _LANES[copy.direction], copy.start_s, copy.end_s, facts)


def _counters(run: Run) -> Iterator[Event]:
    """A counter is written where it changes."""
    last: dict[str, dict[str, int]] = {}
    for step in run.steps:
        found = {
            "KV blocks on the device": {"held": step.num_held, "cached": step.num_cached},
            "KV blocks on the host": {"used": step.num_host_used},
            "requests": {"running": step.num_running, "waiting": step.num_waiting, "preempted": step.num_preempted},
        }
        for name, values in found.items():
            if last.get(name) != values:
                last[name] = values
                yield {"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": _us(step.planned_s), "args": values}


def _incidents(run: Run) -> Iterator[Event]:
    for incident in run.incidents:
        yield {"ph": "i", "s": "g", "name": incident.words, "pid": ENGINE, "tid": STEPS, "ts": _us(incident.at_s), "args": {}}


def _request(request: RequestSeen, track: int, names: Mapping[RequestId, str]) -> Iterator[Event]:
    start_s = request.arrival_s
    facts = {
        "id": request.shown_id,
        "label": request.label,
        "ended": request.reason,
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": request.num_cached_tokens,
        "output_tokens": request.num_output_tokens,
        "stalled_by": words.blame(request, names),
    }
    yield _slice(names[request.request_id], "request", REQUESTS, track, start_s, start_s + request.e2e_s, facts)
    for leg in request.journey.legs:
        yield _leg(leg, track, start_s)
    for mark in request.marks:
        at_us = _us(start_s + mark.at_s)
        yield {"ph": "i", "s": "t", "name": mark.what, "pid": REQUESTS, "tid": track, "ts": at_us, "args": {"why": mark.words}}


def _leg(leg: Leg, track: int, start_s: float) -> Event:
    facts = {"stalled_ms": round(leg.stalled_s * 1e3, 3)}
    return _slice(leg.stage, "leg", REQUESTS, track, start_s + leg.start_s, start_s + leg.end_s, facts)


def _slice(name: str, kind: str, process: int, track: int, start_s: float, end_s: float, facts: Event) -> Event:
    start_us = _us(start_s)
    length_us = round(_us(end_s) - start_us, 3)
    return {
        "ph": "X", "name": name, "cat": kind, "pid": process, "tid": track, "ts": start_us, "dur": length_us, "args": facts,
    }  # fmt: skip


def _us(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e6, 3)
