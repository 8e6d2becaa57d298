"""The slowest requests, each with the stage that held it longest and why."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ....protocol.journey import STAGES
from ...observing.runs import words
from ...observing.runs.run import RequestSeen, Run
from ...observing.runs.words import duration
from .screen import STYLES, plain_table, short_names


def slowest(run: Run, by: str, most: int) -> list[RequestSeen]:
    """At most `most` requests, those with the most `by` (e2e, ttft or a stage) first; none without any of it."""
    found = [(measure(request, by), request) for request in run.requests]
    found = [pair for pair in found if pair[0] > 0.0]
    return [request for _, request in sorted(found, key=lambda pair: -pair[0])[:most]]


def measure(request: RequestSeen, by: str) -> float:
    """Seconds of `request` that `by` names."""
    match by:
        case "e2e":
            return request.e2e_s
        case "ttft":
            return request.ttft_s or 0.0
        case _:
            assert by in STAGES
            return request.journey.seconds().get(by, 0.0)


def print_slowest(run: Run, found: list[RequestSeen], by: str, out: Console) -> None:
    """Print them as a table."""
    if not found:
        out.print(f"no request has any {by} time" if run.requests else "there are no requests in it")
        return
    stage = by if by in STAGES else None
    header = [
        "request",
        "e2e",
        "ttft",
        *([stage] if stage else []),
        "prompt",
        "cached",
        "output",
        "ended",
        "mostly",
        "",
        "because",
    ]
    shown = plain_table(*header, right=("e2e", "ttft", stage or "", "prompt", "cached", "output"))
    shown.columns[-1].no_wrap = False
    names = short_names(run)
    for request in found:
        held = stage or request.dominating
        seconds = request.journey.seconds().get(held, 0.0) if held else 0.0
        shown.add_row(
            Text(names[request.request_id]),
            duration(request.e2e_s),
            "-" if request.ttft_s is None else duration(request.ttft_s),
            *([duration(seconds)] if stage else []),
            f"{request.num_prompt_tokens:,}",
            f"{request.num_cached_tokens:,}",
            f"{request.num_output_tokens:,}",
            request.reason,
            Text(held or "-", style=STYLES.get(held or "", "")),
            f"{seconds / request.e2e_s:.0%}" if request.e2e_s else "-",
            Text(words.cause(run, request, held, names) if held else ""),
        )
    out.print(shown)
