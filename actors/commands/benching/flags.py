"""Flags that benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from ....protocol.errors import ValidationError
from .plot import check_can_plot

LOAD = Group("Load", sort_key=1)
OUTPUT = Group("Output", sort_key=2)
_JSON_HELP = "JSON on standard output in place of the table"


@dataclass(frozen=True)
class OutputFlags:
    """Where results go, beside the table."""

    as_json: Annotated[bool, Parameter(name="--json", help=_JSON_HELP, negative="", show_default=False)] = False
    plot: Annotated[Path | None, Parameter(name="--plot", help="write a picture too: a path that ends in .png")] = None


Output = Annotated[OutputFlags | None, Parameter(name="*", group=OUTPUT)]


def checked_output(output: OutputFlags | None) -> OutputFlags:
    """The flags, or their defaults. Raises where a plot could not be drawn: before the work, not after it."""
    output = output or OutputFlags()
    check_can_plot(output.plot)
    return output


def at_least_one(value: int, name: str) -> None:
    """Raise `ValidationError` naming the flag of `name` where `value` is below 1."""
    if value < 1:
        raise ValidationError(f"--{name.replace('_', '-')} must be at least 1, got {value}", field=name, value=value)
