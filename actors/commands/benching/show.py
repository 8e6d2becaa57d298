"""How results are shown: a table or JSON on standard output, a progress bar on standard error."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .drive import Advance

NO_TERMINAL_WIDTH = 160


class Column(NamedTuple):
    """What a figure is called, and its unit."""

    name: str
    unit: str


Bar = AbstractContextManager[Advance]
"""A progress bar until its block ends; it gives what advances it."""


class Figure(msgspec.Struct, frozen=True):
    """One figure, by repetition."""

    key: str
    name: str
    unit: str
    values: list[float]


@contextmanager
def progress(label: str, total: int, err: TextIO) -> Iterator[Advance]:
    """A bar on `err`, where that is a terminal, until the block ends. Yields what advances it."""
    bar = Progress(
        TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(file=err), transient=True, redirect_stdout=False, redirect_stderr=False, disable=not err.isatty(),
    )  # fmt: skip
    task = bar.add_task(label, total=total)
    with bar:
        yield lambda: bar.advance(task)


def figures_table(figures: Sequence[Figure]) -> Table:
    """Median, smallest and largest of each figure, and what each repetition found."""
    rows = [
        [figure.name, figure.unit, *(number(value) for value in _middle(figure.values)), "  ".join(map(number, figure.values))]
        for figure in figures
    ]
    return table(["", "unit", "median", "min", "max", "by repetition"], rows)


def figures_json(figures: Sequence[Figure]) -> dict[str, Any]:
    """The same as a mapping by key."""
    found = {}
    for figure in figures:
        median, least, most = _middle(figure.values)
        found[figure.key] = {"unit": figure.unit, "median": median, "min": least, "max": most, "values": figure.values}
    return found


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(header):
        shown.add_column(name, justify="right" if index and name != "unit" else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    return shown


def write_table(title: str, shown: Table, out: TextIO) -> None:
    """Print a table under its title; wide ones are not cut where `out` is no terminal."""
    out.write(f"{title}\n")
    Console(file=out, width=None if out.isatty() else NO_TERMINAL_WIDTH, highlight=False, markup=False).print(shown)


def write_json(content: Any, out: TextIO) -> None:
    """Print `content` as indented JSON; a figure that there is not (NaN) is null."""
    out.write(msgspec.json.format(msgspec.json.encode(content)).decode() + "\n")


def number(value: float) -> str:
    """Four digits or so, as a person reads them."""
    if math.isnan(value):
        return "-"
    if value and abs(value) < 10:
        return f"{value:.2f}"
    return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def _middle(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)
