"""`repertory trace`: what became of every request of a run, and why, from its trace or its logs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

from cyclopts import App, CycloptsError, Group, Parameter

from ...protocol.errors import ValidationError
from ...protocol.journey import STAGES

if TYPE_CHECKING:
    from ..observing.runs.run import Run

HELP = """Why was this request slow? What became of every request of a run, and why.

FILE is a trace that --trace-file has written, or the JSON logs of an engine
(--log-format json); "-" is standard input. Logs know of each request which
stages held it and because of whom; a trace also knows every step and copy.

  repertory trace run.jsonl                    the slowest requests
  repertory trace run.jsonl slowest --by ttft  ... until the first token
  repertory trace run.jsonl slowest --by queue ... in one stage
  repertory trace run.jsonl show chat-17       one request's way, by label or id
  repertory trace run.jsonl steps              what the steps were made of
  repertory trace run.jsonl report run.html    all of it, to click through
  repertory trace run.jsonl export --perfetto run.json
                                               for ui.perfetto.dev
  kubectl logs engine | repertory trace - slowest

Stages are those of a request's way (repertory/protocol/journey.py):
  tokenise, queue, blocks, fetch, prefill, decode, preempted, paused, restart,
  detokenise, send, and stalled: what other requests' prefills cost it.
"""

GROUP = Group("What to show", sort_key=0)
AsJson = Annotated[bool, Parameter(name="--json", help="JSON on standard output", negative="", show_default=False)]
By = Literal[("e2e", "ttft", *STAGES)]  # type: ignore[valid-type]  # the words are the stages'

File = Annotated[Any, Parameter(parse=False)]
"""What was read: parsed before the view's own words are."""

_views = App(name="trace", usage="Usage: repertory trace FILE [VIEW]", help=HELP, help_format="plaintext", version_flags=[])


@_views.command
def show(
    request: Annotated[str, Parameter(help="its label, its id as logs print it, or the number in that", group=GROUP)],
    *,
    as_json: AsJson = False,
    run: File,
) -> int:
    """One request's way: a bar for each leg, who is to blame, what was decided about it."""
    from ..observing.runs.finding import find
    from .tracing import waterfall
    from .tracing.screen import console, safe

    found = find(run, request)
    if as_json:
        return _print_json(waterfall.as_json(run, found[0]))
    out = console(sys.stdout)
    _say_notes(run)
    waterfall.print_waterfall(run, found[0], out)
    if len(found) > 1:
        others = ", ".join(one.shown_id for one in found[1:6])
        out.print(f"{len(found):,} requests are called {safe(request)}; this is the slowest. Others: {others}")
    return 0


@_views.command
def slowest(
    *,
    by: Annotated[By, Parameter(help="end-to-end time, time to the first token, or a stage", group=GROUP)] = "e2e",
    n: Annotated[int, Parameter(name=["-n", "--number"], help="how many", group=GROUP)] = 10,
    as_json: AsJson = False,
    run: File,
) -> int:
    """The slowest requests, the stage that held each longest, and why."""
    from .tracing import slowest as table
    from .tracing import waterfall
    from .tracing.screen import console

    _at_least_one(n, "-n")
    found = table.slowest(run, by, n)
    if as_json:
        return _print_json([waterfall.as_json(run, request) for request in found])
    _say_notes(run)
    out = console(sys.stdout)
    out.print(_summary(run))
    table.print_slowest(run, found, by, out)
    return 0


@_views.command
def steps(
    *,
    bins: Annotated[int, Parameter(help="equal parts of the time", group=GROUP)] = 24,
    as_json: AsJson = False,
    run: File,
) -> int:
    """What the steps were made of over time, how long they took and were predicted to take, and how full memory was."""
    from ..observing.runs.binning import binned
    from .tracing.screen import console
    from .tracing.steps import print_steps

    _at_least_one(bins, "--bins")
    found = binned(run, bins)
    if as_json:
        return _print_json(found)
    if not found:
        hint = "logs do not have them; run with --trace-file" if run.source == "logs" else "none has ended in it"
        raise ValidationError(f"{run.name}: there are no steps in it: {hint}", field="file", value=run.name)
    _say_notes(run)
    print_steps(found, len(run.steps), console(sys.stdout))
    return 0


@_views.command
def export(
    *,
    perfetto: Annotated[Path, Parameter(help="the file to write, for ui.perfetto.dev or chrome://tracing", group=GROUP)],
    run: File,
) -> int:
    """Write the run as trace events: tracks for steps, copies and each request, counters for memory and queues."""
    from ..observing.perfetto import write

    with _writing(perfetto) as out:
        count = write(run, out)
    _say_notes(run)
    return _say(f"{perfetto}: {count:,} events; open it at https://ui.perfetto.dev")


@_views.command
def report(
    out: Annotated[Path, Parameter(help="the HTML file to write", group=GROUP)],
    *,
    run: File,
) -> int:
    """Write one HTML file that shows the run: timeline, memory, queues, each request's way to click. It needs no network."""
    from ..observing.report.build import build

    with _writing(out) as file:
        num_bytes = file.write(build(run))
    _say_notes(run)
    return _say(
        f"{out}: {len(run.requests):,} requests, {len(run.steps):,} steps, {num_bytes:,} characters; open it in a browser"
    )


trace = App(name="trace", help=HELP, help_format="plaintext", help_flags=[], version_flags=[])
"""Reads FILE first; the words after it are the views'."""


@trace.default
def open_and_show(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
) -> int:
    """Read FILE and show it in the way that the words after it say."""
    file, *view = words or ("--help",)
    if file in ("--help", "-h"):
        return _help([])
    if {"--help", "-h"} & set(view):
        return _help(view[:1])
    if file in _views:
        raise ValidationError(f"trace: the file comes first: repertory trace FILE {' '.join(words)}", field="file", value=file)
    from ..observing.runs.opening import open_run

    try:
        command, bound, _ = _views.parse_args(view or ["slowest"], print_error=False, exit_on_error=False, verbose=False)
    except CycloptsError as error:
        raise ValidationError(f"trace: {error}") from None
    status: int = command(*bound.args, **bound.kwargs, run=open_run(file))
    return status


def _help(view: list[str]) -> int:
    _views.help_print([word for word in view if word in _views])
    return 0


def _summary(run: Run) -> str:
    from ..observing.runs.words import count, duration

    steps = f", {count(len(run.steps), 'step')}" if run.steps else ""
    preemptions = count(sum(request.num_preemptions for request in run.requests), "preemption")
    return f"{run.name}: {count(len(run.requests), 'request')} in {duration(run.duration_s)}{steps}, {preemptions}"


def _say_notes(run: Run) -> None:
    for note in run.notes:
        sys.stderr.write(f"note: {note}\n")


def _say(words: str) -> int:
    sys.stdout.write(f"{words}\n")
    return 0


def _print_json(content: Any) -> int:
    from .benching.show import write_json

    write_json(content, sys.stdout)
    return 0


@contextmanager
def _writing(path: Path) -> Iterator[TextIO]:
    """The file at `path`, to be written anew; `ValidationError` where it cannot be."""
    try:
        with path.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ValidationError(f"{path}: {error.strerror or error}", field="out", value=str(path)) from None


def _at_least_one(value: int, flag: str) -> None:
    if value < 1:
        raise ValidationError(f"{flag} must be at least 1, got {value}", field=flag, value=value)
