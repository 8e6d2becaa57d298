"""What a hand-driven device says to an operation that was handed to it too early."""

from __future__ import annotations

from ...protocol.messages import Fences
from ..timelines import Timelines


class FenceViolation(Exception):
    """An operation was run before one that it waits for: whoever drives this device by hand forgot to wait."""


def check_fences(timelines: Timelines, after: Fences, operation: str) -> None:
    """Raise `FenceViolation` unless everything that `after` names is complete."""
    unmet = timelines.unmet(after)
    if unmet:
        waits = ", ".join(f"{name} {getattr(after, name)} ({getattr(timelines.completed, name)} is complete)" for name in unmet)
        raise FenceViolation(f"{operation} runs before what it waits for: {waits}")
