"""The terminal, and what is drawn on it with characters."""

from __future__ import annotations

import io
import math
from typing import TextIO

from rich.console import Console
from rich.table import Table

from ....protocol.ids import RequestId
from ...observing.runs.run import Run

NO_TERMINAL_WIDTH = 120
MOST_NAME = 30

STYLES = {
    "tokenise": "cyan",
    "queue": "yellow",
    "blocks": "dark_orange",
    "fetch": "magenta",
    "prefill": "green",
    "decode": "blue",
    "preempted": "red",
    "paused": "bright_black",
    "restart": "bright_red",
    "detokenise": "bright_cyan",
    "send": "bright_white",
    "stalled": "bright_magenta",
}
"""Colours of stages."""


def console(out: TextIO) -> Console:
    """One as wide as the terminal, or wide enough where `out` is none. What its encoding lacks becomes a question mark."""
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")
    return Console(file=out, width=None if out.isatty() else NO_TERMINAL_WIDTH, highlight=False, markup=False, emoji=False)


def plain_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without lines; the columns named in `right` are numbers."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        shown.add_column(name, justify="right" if name in right else "left", no_wrap=True, overflow="ellipsis")
    return shown


def safe(words: str) -> str:
    """Without characters that a terminal would obey: labels are anybody's."""
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def short_names(run: Run) -> dict[RequestId, str]:
    """What requests are called, fit for a column: safe, and of `MOST_NAME` characters at most."""
    names = {request_id: safe(name) for request_id, name in run.names().items()}
    return {request_id: name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 3]}..." for request_id, name in names.items()}


def level(share: float, width: int, *, ascii_only: bool = False) -> str:
    """A bar of `width` characters of which `share` (0 to 1) is filled; what is not nothing shows."""
    share = min(1.0, max(0.0, share))
    if ascii_only:
        return ("#" * math.ceil(share * width)).ljust(width)
    eighths = math.ceil(share * width * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)


def stretch(start: float, end: float, total: float, width: int) -> tuple[int, int]:
    """First character and number of characters (at least 1) of a stretch of `total` on a line of `width`."""
    if total <= 0:
        return 0, 1
    first = min(width - 1, round(start / total * width))
    return first, max(1, min(width, round(end / total * width)) - first)
