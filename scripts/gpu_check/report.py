"""A part's side of the results: what it finds is written down at once, so that a part that is cut off leaves what it had."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .results import Finding, Verdict, number


class Report:
    """Findings of one part, a line of JSON each. In a rehearsal aims are measured and not judged."""

    def __init__(self, path: Path, *, is_rehearsal: bool) -> None:
        self._file = path.open("a", buffering=1)
        self._is_rehearsal = is_rehearsal

    def close(self) -> None:
        """There is nothing more to report."""
        self._file.close()

    def say(self, text: str) -> None:
        """A line of progress."""
        print(text, flush=True)

    def right(self, what: str, is_right: bool, *, value: float | None = None, unit: str = "", note: str = "") -> None:
        """Something that is right or wrong."""
        self._found(Finding(what, value, unit, "right" if is_right else "WRONG", note))

    def figure(self, what: str, value: float, unit: str, *, note: str = "") -> None:
        """Something measured that nobody judges."""
        self._found(Finding(what, value, unit, "", note))

    def at_most(self, what: str, value: float, unit: str, aim: float, *, note: str = "") -> None:
        """Something measured that should not be more than `aim`."""
        self._aimed(what, value, unit, value <= aim, f"at most {number(aim)} {unit}".rstrip() + (note and f"; {note}"))

    def at_least(self, what: str, value: float, unit: str, aim: float, *, note: str = "") -> None:
        """Something measured that should not be less than `aim`."""
        self._aimed(what, value, unit, value >= aim, f"at least {number(aim)} {unit}".rstrip() + (note and f"; {note}"))

    def skip(self, what: str, why: str) -> None:
        """Something that cannot be looked at here."""
        self._found(Finding(what, verdict="skipped", note=why))

    def detail(self, key: str, value: Any) -> None:
        """For the JSON alone."""
        self._write({"detail": [key, value]})

    def machine(self, facts: dict[str, Any]) -> None:
        """What all this was found on."""
        self._write({"machine": facts})

    def failed(self, error: BaseException) -> None:
        """The part ends with this exception."""
        lines = traceback.format_exception(error)
        self._write({"error": lines[-1].strip().splitlines()[-1], "traceback": "".join(lines)})

    def _aimed(self, what: str, value: float, unit: str, is_met: bool, note: str) -> None:
        verdict: Verdict = "" if self._is_rehearsal else "met" if is_met else "MISSED"
        self._found(Finding(what, value, unit, verdict, note))

    def _found(self, finding: Finding) -> None:
        self.say(f"{finding.what}: {'' if finding.value is None else number(finding.value)} {finding.unit} {finding.verdict}")
        self._write({"finding": asdict(finding)})

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
