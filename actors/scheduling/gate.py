"""When waiting requests may join: the policy's word, and the wait to gather a batch.

`scheduling_delay_s` is the longest a request waits for company, whatever runs.
`scheduling_delay_factor` is the same as a multiple of the last prefill step's duration, and holds
back only beside running requests (vLLM's old meaning). Either wait ends early once there is
company enough to fill the free slots.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from ...protocol.config import EngineConfig
from .policies import SchedulingPolicy
from .sequence import Sequence


class Gate:
    """Decides once a step whether new requests come in, and when to ask again."""

    def __init__(self, config: EngineConfig, policy: SchedulingPolicy) -> None:
        self.config = config
        self.policy = policy
        self.last_prefill_s = 0.0
        self.opens_at: float | None = None
        """While requests are being gathered: when the wait is over, in the caller's clock."""

    def opens(self, now: float, waiting: Items[Sequence], *, num_running: int, limit: int) -> bool:
        """Whether `waiting` may join `num_running` running sequences now."""
        self.opens_at = None
        if not waiting or not self.policy.admits_beside(num_running):
            return False
        delay = self._delay(num_running)
        if delay <= 0 or len(waiting) >= limit - num_running:
            return True
        opens_at = min(seq.queued_s for seq in waiting) + delay
        if now >= opens_at:
            return True
        self.opens_at = opens_at
        return False

    def _delay(self, num_running: int) -> float:
        if self.config.scheduling_delay_s > 0:
            return self.config.scheduling_delay_s
        return self.config.scheduling_delay_factor * self.last_prefill_s if num_running else 0.0
