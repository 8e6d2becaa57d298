"""One request's way through the company: a bar a leg, who is to blame, what was decided."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ....protocol.ids import show_request_id
from ...observing.runs import words
from ...observing.runs.run import RequestSeen, Run
from ...observing.runs.words import duration
from .screen import STYLES, plain_table, safe, short_names, stretch

LEAST_BAR, OTHER_COLUMNS = 20, 57


def print_waterfall(run: Run, request: RequestSeen, out: Console) -> None:
    """Print everything that is known of `request`."""
    names = short_names(run)
    out.print(Text(safe(_headline(request, run.names()[request.request_id])), style="bold"))
    out.print(f"arrived {words.moment(run, request.arrival_s)}; {_tokens(request)}")
    if not request.journey.legs:
        out.print("nothing is known of its way")
        return
    out.print()
    _print_legs(request, out)
    out.print()
    longest = request.dominating
    if longest is not None:
        seconds = request.journey.seconds()[longest]
        why = words.cause(run, request, longest, names)
        out.print(f"most of it: {longest}, {duration(seconds)} ({seconds / request.e2e_s:.0%}): {why}")
    stalled_s = request.journey.seconds().get("stalled", 0.0)
    if stalled_s:
        guilty = words.blame(request, names)
        by = f" by the prefill{'s' if len(request.journey.stalled_by) > 1 else ''} of {guilty}" if guilty else ""
        out.print(f"stalled {duration(stalled_s)}{by}")
    for mark in request.marks:
        out.print(safe(f"at {duration(mark.at_s)}: {mark.words}"))
    if request.is_derived:
        out.print("(put together from other records: it has no journey of its own here)", style="dim")


def as_json(run: Run, request: RequestSeen) -> dict[str, object]:
    """The same for machines. Seconds; `legs` and `marks` count from the arrival."""
    return {
        "request_id": request.shown_id,
        "label": request.label,
        "arrival_s": request.arrival_s,
        "arrived_at": None if run.wall_s is None else run.wall_s + request.arrival_s,
        "reason": request.reason,
        "e2e_s": request.e2e_s,
        "ttft_s": request.ttft_s,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_output_tokens": request.num_output_tokens,
        "num_preemptions": request.num_preemptions,
        "stages": request.journey.seconds(),
        "legs": request.journey.legs,
        "stalled_by": [[show_request_id(who), seconds] for who, seconds in request.journey.stalled_by],
        "marks": request.marks,
        "is_derived": request.is_derived,
    }


def _headline(request: RequestSeen, name: str) -> str:
    name = name if request.shown_id in name else f"{name} ({request.shown_id})"
    ended = {"unknown": "its end is not there", "refused": "refused"}.get(request.reason, f"ended by {request.reason}")
    first = "" if request.ttft_s is None else f", first token after {duration(request.ttft_s)}"
    return f"{name}: {duration(request.e2e_s)}{first}, {ended}"


def _tokens(request: RequestSeen) -> str:
    again = f", {words.count(request.num_preemptions, 'preemption')}" if request.num_preemptions else ""
    return (
        f"{request.num_prompt_tokens:,} prompt tokens, {request.num_cached_tokens:,} of them cached; "
        f"{request.num_output_tokens:,} output tokens{again}"
    )


def _print_legs(request: RequestSeen, out: Console) -> None:
    total_s = request.e2e_s
    width = max(LEAST_BAR, out.width - OTHER_COLUMNS)
    is_plain = out.options.ascii_only
    shown = plain_table("at", "stage", "actor", "time", "share", "", right=("at", "time", "share"))
    for leg in request.journey.legs:
        seconds = leg.end_s - leg.start_s
        first, length = stretch(leg.start_s, leg.end_s, total_s, width)
        num_stalled = min(length, round(length * leg.stalled_s / seconds)) if seconds else 0
        bar = Text(" " * first)
        bar.append(("=" if is_plain else "█") * (length - num_stalled), style=STYLES[leg.stage])
        bar.append(("~" if is_plain else "▒") * num_stalled, style=STYLES["stalled"])
        share = f"{seconds / total_s:.1%}" if total_s else "-"
        name, actor = Text(leg.stage, style=STYLES[leg.stage]), words.ACTORS[leg.stage]
        shown.add_row(duration(leg.start_s), name, actor, duration(seconds), share, bar)
        if leg.stalled_s:
            stalled = f"{leg.stalled_s / total_s:.1%}" if total_s else "-"
            shown.add_row("", Text("  stalled", style=STYLES["stalled"]), "", duration(leg.stalled_s), stalled, "")
    out.print(shown)
