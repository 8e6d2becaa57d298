"""What a check found: one file of JSON, written anew after each part, and a table. Standard library only."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

_MOST_CHARACTERS = 100
"""Of a note in the table."""

Verdict = Literal["", "right", "WRONG", "met", "MISSED", "skipped"]
"""`right` and `WRONG` are about correctness and decide the exit status; `met` and `MISSED` about an aim."""

State = Literal["done", "failed", "cut off", "dropped"]
"""`dropped`: not begun, for want of time. Only such a part is not counted against the whole."""


@dataclass(frozen=True)
class Finding:
    """A line of the table. `note` says what it is held against, or why it was skipped."""

    what: str
    value: float | None = None
    unit: str = ""
    verdict: Verdict = ""
    note: str = ""


@dataclass
class PartResult:
    """What became of a part. `error` is the last line of `traceback`, or what happened in words."""

    name: str
    state: State
    seconds: float = 0.0
    limit_s: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    traceback: str = ""

    @property
    def is_right(self) -> bool:
        """Whether nothing of it that ran was wrong, and it ran to its end."""
        return self.state == "dropped" or (self.state == "done" and all(one.verdict != "WRONG" for one in self.findings))


@dataclass
class Results:
    """All of a check. `machine` is what the first part that ran saw of the device and the libraries."""

    is_rehearsal: bool
    started: str
    budget_s: float
    seconds: float = 0.0
    machine: dict[str, Any] = field(default_factory=dict)
    parts: list[PartResult] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether every part that ran passed its correctness."""
        return all(part.is_right for part in self.parts)

    def write(self, path: Path) -> None:
        """Write everything so far as JSON; a reader finds the old file or the new one."""
        text = json.dumps(_plain({**asdict(self), "is_right": self.is_right}), indent=1, allow_nan=False)
        beside = path.with_name(path.name + ".part")
        beside.write_text(text + "\n")
        os.replace(beside, path)


def read_records(path: Path, result: PartResult) -> dict[str, Any]:
    """Add what a part wrote down (`report.py`) to `result`; return what it said of the machine.

    The last line may have been cut off in its middle.
    """
    machine: dict[str, Any] = {}
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        match record:
            case {"finding": finding}:
                result.findings.append(Finding(**finding))
            case {"detail": [key, value]}:
                result.details[key] = value
            case {"machine": facts}:
                machine = facts
            case {"error": error, "traceback": text}:
                result.error, result.traceback = error, text
    return machine


def table(results: Results) -> str:
    """The findings as aligned text, ending with the verdict in a line."""
    lines = [["part", "what", "value", "", "against"]]
    for part in results.parts:
        rows = [
            [part.name, one.what, _value(one), one.verdict if one.verdict != "skipped" else "-", _cut(one.note)]
            for one in part.findings
        ]
        if part.state != "done":
            rows.append([part.name, part.state, "", "" if part.state == "dropped" else "FAILED", _cut(part.error)])
        lines += rows
    return "\n".join([*_aligned(lines), "", *_last_lines(results)])


def _cut(text: str) -> str:
    """What the table has room for; the JSON has all of it."""
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def _value(finding: Finding) -> str:
    return "" if finding.value is None else f"{number(finding.value)} {finding.unit}".rstrip()


def number(value: float) -> str:
    """Three or four digits, as a person reads them."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        part, what, value, verdict, note = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join((part, what, value.strip().rjust(len(value)), verdict, note)).rstrip()


def _last_lines(results: Results) -> Iterable[str]:
    if results.machine:
        yield ", ".join(f"{key} {value}" for key, value in results.machine.items())
    judged = [one.verdict for part in results.parts for one in part.findings if one.verdict in ("met", "MISSED")]
    yield f"{results.seconds:.0f} s; aims met: {judged.count('met')} of {len(judged)}"
    if results.is_rehearsal:
        yield "REHEARSED ON A CPU: timings mean nothing, and no aim was judged"
    wrong = [part.name for part in results.parts if not part.is_right]
    ran = [part for part in results.parts if part.state != "dropped"]
    if wrong:
        yield f"WRONG: {', '.join(wrong)}"
    else:
        yield f"right: all {len(ran)} parts that ran" if ran else "nothing ran"


def _plain(value: Any) -> Any:
    """`value` with numbers that JSON has not (NaN, infinities) as words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
