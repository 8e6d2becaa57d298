"""Reading a trace file, also one that a crash has cut short."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from .errors import ValidationError, shorten
from .trace import TRACE_VERSION, AnyRecord, Began


class Trace(NamedTuple):
    """A trace as it lies in its file."""

    began: Began
    records: list[AnyRecord]
    """All that follow, in order."""
    is_torn: bool
    """The last line was not whole, and is not among them: the run that wrote it was cut off."""


class _AnyType(msgspec.Struct):
    type: str


_decoder = msgspec.json.Decoder(AnyRecord)
_types = {kind.__name__ for kind in AnyRecord.__args__}


def is_trace(first_line: bytes) -> bool:
    """Whether a file that starts with this line is a trace of ours."""
    try:
        return msgspec.json.decode(first_line, type=_AnyType).type == Began.__name__
    except msgspec.DecodeError:
        return False


def read_trace(path: Path) -> Trace:
    """The whole trace. Raises `ValidationError` with the line where it is none, or is of another version."""
    try:
        with path.open("rb") as file:
            began, records = open_trace(file, str(path))
            rest = list(records)
    except OSError as error:
        raise ValidationError(f"{path}: {error.strerror or error}", field="trace", value=str(path)) from None
    whole = [record for record in rest if record is not None]
    return Trace(began, whole, is_torn=len(whole) < len(rest))


def open_trace(lines: Iterable[bytes], name: str) -> tuple[Began, Iterator[AnyRecord | None]]:
    """The beginning of a trace, and what follows, one by one; None at the end where the last line was torn.

    `name` is what errors call it. Raises `ValidationError` as `read_trace` does, now or at the line at fault.
    """
    records = _records(lines, name)
    began = next(records, None)
    if not isinstance(began, Began):
        raise ValidationError(f"{name}: the first line is not a trace's beginning", field="trace", value=name)
    if began.version != TRACE_VERSION:
        raise ValidationError(
            f"{name}: a trace of version {began.version}; this version of repertory reads {TRACE_VERSION}",
            field="trace",
            value=began.version,
        )
    return began, records


def _records(lines: Iterable[bytes], name: str) -> Iterator[AnyRecord | None]:
    """Each record; at the end None if the last line was torn."""
    torn: ValidationError | None = None
    line = b""
    for number, line in enumerate(lines, start=1):
        if torn is not None:
            raise torn  # it was not the last
        try:
            yield _decoder.decode(line)
        except msgspec.DecodeError as error:
            if not _is_unknown(line):
                torn = ValidationError(f"{name}, line {number}: {error}", field="trace", value=shorten(str(line)))
    if torn is not None:
        if line.endswith(b"\n"):
            raise torn
        yield None


def _is_unknown(line: bytes) -> bool:
    """Whether a line is a whole record of a type that came after this version."""
    try:
        return msgspec.json.decode(line, type=_AnyType).type not in _types
    except msgspec.DecodeError:
        return False
