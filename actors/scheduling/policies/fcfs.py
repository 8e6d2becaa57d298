"""First come, first served."""

from __future__ import annotations

from ....protocol.messages import Admit


class Policy:
    """One class: order of arrival decides."""

    def priority_class(self, admit: Admit) -> int:
        """All requests are of one class."""
        return 0

    def admits_beside(self, num_running: int) -> bool:
        """Always: continuous batching."""
        return True
