"""Opening what `repertory trace` is given: a trace or JSON logs, told apart by the first line."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

from ....protocol.errors import ValidationError
from ....protocol.trace_reading import is_trace
from . import of_logs, of_trace
from .run import Run

STDIN = "-"


def open_run(file: str) -> Run:
    """The run in `file` (`-`: standard input). Raises `ValidationError` where there is none in it."""
    if file == STDIN:
        return _read(sys.stdin.buffer, "standard input")
    try:
        with Path(file).open("rb") as lines:
            return _read(lines, file)
    except OSError as error:
        raise ValidationError(f"{file}: {error.strerror or error}", field="file", value=file) from None


def _read(lines: Iterable[bytes], name: str) -> Run:
    lines = iter(lines)
    first = next(lines, None)
    if first is None:
        raise ValidationError(f"{name}: there is nothing in it", field="file", value=name)
    lines = itertools.chain([first], lines)
    return of_trace.read_run(lines, name) if is_trace(first) else of_logs.read_run(lines, name)
