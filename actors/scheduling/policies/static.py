"""Static batching, the baseline: a batch runs until its slowest member ends."""

from __future__ import annotations

from ....protocol.messages import Admit


class Policy:
    """Order of arrival, in batches: nobody joins while anybody runs."""

    def priority_class(self, admit: Admit) -> int:
        """All requests are of one class."""
        return 0

    def admits_beside(self, num_running: int) -> bool:
        """Only into an empty engine."""
        return num_running == 0
