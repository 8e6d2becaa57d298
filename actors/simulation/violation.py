"""What a checker says."""

from __future__ import annotations


class Violation(Exception):
    """Something happened that must not: `rule` names what was broken, the text says how."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule
