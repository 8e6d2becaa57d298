"""What the page is given: a run as JSON of numbers and words, coarser where there is more than can be looked at.

Columns rather than objects, since there may be a hundred thousand steps. Times are seconds, to the microsecond.
Request ids are words: they have 63 bits, and a number in JavaScript has 53.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....protocol.ids import RequestId, show_request_id
from ....protocol.journey import STAGES
from ..runs import words
from ..runs.run import CopySeen, RequestSeen, Run, StepSeen

MOST_STEPS = 100_000
"""Steps that are shown one by one; of more, equally many neighbours become one."""
MOST_COPIES = 50_000
MOST_REQUESTS = 10_000
"""Requests that are listed: the slowest."""
MOST_MARKS = 50
"""Decisions that are listed of one request."""

Columns = dict[str, list[Any]]


def contents(run: Run, *, most_steps: int = MOST_STEPS, most_requests: int = MOST_REQUESTS) -> dict[str, Any]:
    """All that the page shows of `run`, notes about what it does not show among it."""
    notes = list(run.notes)
    requests = run.requests
    if len(requests) > most_requests:
        notes.append(f"The {most_requests:,} slowest of {len(requests):,} requests are listed.")
        slowest = sorted(requests, key=lambda request: -request.e2e_s)[:most_requests]
        requests = sorted(slowest, key=lambda request: request.arrival_s)
    steps = [step for step in run.steps if step.start_s is not None]
    size = max(1, -(-len(steps) // most_steps))
    if size > 1:
        notes.append(f"Each {size} neighbouring steps are drawn as one.")
    copies_size = max(1, -(-len(run.copies) // MOST_COPIES))
    if copies_size > 1:
        notes.append(f"Each {copies_size} neighbouring copies of a lane are drawn as one.")
    names = run.names()
    index = {request.request_id: number for number, request in enumerate(requests)}
    return {
        "name": run.name,
        "engine": run.engine,
        "device": run.device,
        "wall_s": run.wall_s,
        "duration_s": _s(max([run.duration_s, *(step.end_s for step in steps[-1:])])),
        "block_size": run.block_size,
        "num_device_blocks": run.num_device_blocks,
        "num_host_blocks": run.num_host_blocks,
        "num_requests": len(run.requests),
        "num_steps": len(run.steps),
        "notes": notes,
        "stages": [[stage, words.MEANINGS[stage], words.ACTORS[stage]] for stage in STAGES],
        "steps": _steps(steps, size),
        "copies": {
            lane: _copies([copy for copy in run.copies if copy.direction == lane], copies_size) for lane in ("out", "in")
        },
        "incidents": [[_s(incident.at_s), incident.words] for incident in run.incidents],
        "requests": [_request(run, request, names, index) for request in requests],
    }


def _steps(steps: Sequence[StepSeen], size: int) -> Columns:
    groups = [steps[first : first + size] for first in range(0, len(steps), size)]

    def mean(of: Callable[[StepSeen], float]) -> list[float]:
        return [round(sum(of(step) for step in group) / len(group), 6 if size == 1 else 1) for group in groups]

    return {
        "id": [group[0].step_id for group in groups],
        "count": [len(group) for group in groups],
        "planned": [_s(group[0].planned_s) for group in groups],
        "start": [_s(group[0].start_s or 0.0) for group in groups],
        "end": [_s(group[-1].end_s) for group in groups],
        "busy": [_s(sum(step.seconds for step in group)) for group in groups],
        "predicted": [_predicted(group) for group in groups],
        "prefill": [sum(step.num_prefill_tokens for step in group) for group in groups],
        "decodes": [sum(step.num_decodes for step in group) for group in groups],
        "held": mean(lambda step: step.num_held),
        "cached": mean(lambda step: step.num_cached),
        "host": mean(lambda step: step.num_host_used),
        "running": mean(lambda step: step.num_running),
        "waiting": mean(lambda step: step.num_waiting),
        "preempted": mean(lambda step: step.num_preempted),
    }


def _predicted(group: Sequence[StepSeen]) -> float | None:
    """Of all of them; None where one had no prediction."""
    total = 0.0
    for step in group:
        if step.predicted_s is None:
            return None
        total += step.predicted_s
    return _s(total)


def _copies(copies: Sequence[CopySeen], size: int) -> Columns:
    groups = [copies[first : first + size] for first in range(0, len(copies), size)]
    return {
        "start": [_s(group[0].start_s) for group in groups],
        "end": [_s(group[-1].end_s) for group in groups],
        "bytes": [sum(copy.num_bytes for copy in group) for group in groups],
        "ok": [int(all(copy.ok for copy in group)) for group in groups],
    }


def _request(run: Run, request: RequestSeen, names: dict[RequestId, str], index: dict[RequestId, int]) -> dict[str, Any]:
    held = request.dominating
    marks = request.marks[:MOST_MARKS]
    return {
        "id": request.shown_id,
        "name": names[request.request_id],
        "arrival": _s(request.arrival_s),
        "e2e": _s(request.e2e_s),
        "ttft": None if request.ttft_s is None else _s(request.ttft_s),
        "reason": request.reason,
        "prompt": request.num_prompt_tokens,
        "cached": request.num_cached_tokens,
        "output": request.num_output_tokens,
        "preemptions": request.num_preemptions,
        "derived": int(request.is_derived),
        "legs": [[STAGES.index(leg.stage), _s(leg.start_s), _s(leg.end_s), _s(leg.stalled_s)] for leg in request.journey.legs],
        "blamed": [
            [names.get(who, show_request_id(who)), _s(seconds), index.get(who, -1)]
            for who, seconds in request.journey.stalled_by
        ],
        "marks": [[_s(mark.at_s), mark.what, mark.words] for mark in marks],
        "num_marks": len(request.marks),
        "mostly": STAGES.index(held) if held else -1,
        "because": words.cause(run, request, held, names) if held else "",
    }


def _s(seconds: float) -> float:
    return round(seconds, 6)
