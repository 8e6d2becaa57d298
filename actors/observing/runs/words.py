"""Sentences about what was decided, and about why a stage took its time: the same in the terminal and in the report."""

from __future__ import annotations

import datetime
from bisect import bisect_right
from collections.abc import Mapping
from operator import attrgetter

from ....protocol.ids import RequestId, show_request_id
from ....protocol.journey import Stage
from .run import RequestSeen, Run

MEANINGS: Mapping[Stage, str] = {
    "tokenise": "its prompt is read, after those before it",
    "queue": "others are before it, or hold all slots",
    "blocks": "it is next and does not fit: not enough KV memory yet",
    "fetch": "part of it is on the host and is copied in",
    "prefill": "its known tokens are computed, chunk by chunk",
    "decode": "its tokens are generated",
    "preempted": "it gave its blocks up and waits to come back",
    "paused": "its reader is behind, and it waits for it",
    "restart": "the device was lost; it waits for its turn on a new one",
    "detokenise": "text is made of its last token",
    "send": "its frontend takes its last text",
    "stalled": "its steps lasted longer for other requests' prefills",
}

ACTORS: Mapping[Stage, str] = {
    "tokenise": "Tokenizer",
    "queue": "Scheduler",
    "blocks": "Scheduler",
    "fetch": "SwapManager",
    "prefill": "Worker",
    "decode": "Worker",
    "preempted": "Scheduler",
    "paused": "its reader",
    "restart": "DeviceKeeper",
    "detokenise": "Detokenizer",
    "send": "Dispatcher",
    "stalled": "Worker",
}
"""Who has it, or whom it waits for."""


def duration(seconds: float) -> str:
    """Three digits with the unit a person would use."""
    if not seconds:
        return "0"
    size = abs(seconds)
    value, unit = (
        (seconds * 1e6, "us")
        if size < 0.9995e-3
        else (seconds * 1e3, "ms")
        if size < 0.9995
        else (seconds, "s")
        if size < 600
        else (seconds / 60, "min")
    )
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"


def moment(run: Run, at_s: float) -> str:
    """A time of `run` on the calendar, or where that is not known since its beginning."""
    if run.wall_s is None:
        return f"at {at_s:.3f} s"
    when = datetime.datetime.fromtimestamp(run.wall_s + at_s, tz=datetime.UTC)
    return f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03} UTC"


def count(number: int, what: str) -> str:
    """One of it, or several."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def preempted(mode: str, num_tokens: int, num_freed_blocks: int, swap_s: float, recompute_s: float, reason: str) -> str:
    """One preemption with the costs it was decided by."""
    return (
        f"preempted by {mode} ({reason}): {num_freed_blocks} blocks freed, {num_tokens} tokens; "
        f"copying out and in would cost {duration(swap_s)}, computing again {duration(recompute_s)}"
    )


def host_hit(fetched: bool, num_tokens: int, fetch_s: float, recompute_s: float) -> str:
    """What was done about tokens that only the host had."""
    done = "copied in" if fetched else "computed again"
    return f"{num_tokens} tokens on the host {done}: copying costs {duration(fetch_s)}, computing again {duration(recompute_s)}"


def paused(num_output_tokens: int) -> str:
    """Its reader fell behind."""
    return f"paused after {num_output_tokens} output tokens: its reader is behind"


def blame(request: RequestSeen, names: Mapping[RequestId, str], most: int = 5) -> str:
    """Whose prefills cost it how much; empty where nobody's did."""
    guilty = [
        f"{names.get(who, show_request_id(who))} ({duration(seconds)})" for who, seconds in request.journey.stalled_by[:most]
    ]
    return ", ".join(guilty)


def cause(run: Run, request: RequestSeen, stage: Stage, names: Mapping[RequestId, str]) -> str:
    """Why `stage` held `request` as long as it did, as far as the run tells."""
    match stage:
        case "stalled":
            guilty = blame(request, names, most=3)
            return f"prefills of {guilty}" if guilty else "other requests' prefills"
        case "queue" | "blocks":
            return _crowd(run, request, stage)
        case "prefill":
            computed = request.num_prompt_tokens - request.num_cached_tokens
            again = f", and again after {count(request.num_preemptions, 'preemption')}" if request.num_preemptions else ""
            return f"{computed:,} prompt tokens, {request.num_cached_tokens:,} more from the cache{again}"
        case "decode":
            seconds = request.journey.seconds().get("decode", 0.0)
            each = f", {duration(seconds / request.num_output_tokens)} each" if request.num_output_tokens else ""
            return f"{request.num_output_tokens:,} tokens{each}"
        case "preempted" | "paused" | "fetch":
            what = {"preempted": "preempted", "paused": "paused", "fetch": "host hit"}[stage]
            marks = [mark.words for mark in request.marks if mark.what == what]
            return marks[0] if marks else MEANINGS[stage]
        case _:
            return MEANINGS[stage]


def _crowd(run: Run, request: RequestSeen, stage: Stage) -> str:
    """How full it was when the wait began."""
    start_s = next((leg.start_s for leg in request.journey.legs if leg.stage == stage), 0.0) + request.arrival_s
    index = bisect_right(run.steps, start_s, key=attrgetter("planned_s"))
    if not run.steps:
        return MEANINGS[stage]
    step = run.steps[max(0, index - 1)]
    held = f", requests held {step.num_held / run.num_device_blocks:.0%} of KV" if run.num_device_blocks else ""
    return f"{step.num_running} running, {step.num_waiting + step.num_preempted} waiting when it began{held}"
