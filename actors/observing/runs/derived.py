"""A request's journey from what a trace says of its sequences, where the request's own account of it is not there.

That is so while it runs: when the trace was cut off, or closed before it ended. Waits for memory count as queue, what
others' prompts cost as the stage that they held up, and what comes after the last token is not told.
"""

from __future__ import annotations

from ....protocol.journey import MOST_LEGS, Journey, Leg, Stage


class JourneySoFar:
    """The stages of one request as they are entered; times on any one clock."""

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.stage: Stage = "tokenise"
        self._since_s = arrival_s
        self._legs: list[Leg] = []

    def enter(self, stage: Stage, at: float) -> None:
        """It is in `stage` from here on."""
        if stage != self.stage:
            self._leave(at)
            self.stage = stage

    def until(self, at: float) -> Journey:
        """The journey, ended here."""
        self._leave(at)
        if len(self._legs) <= MOST_LEGS:
            return Journey(list(self._legs))
        kept = self._legs[: MOST_LEGS - 1]
        return Journey([*kept, Leg(self._legs[-1].stage, kept[-1].end_s, self._legs[-1].end_s)])

    def _leave(self, at: float) -> None:
        at = max(at, self._since_s)  # clocks of different actors may be read out of order
        if at > self._since_s:
            self._legs.append(Leg(self.stage, self._since_s - self.arrival_s, at - self.arrival_s))
        self._since_s = at
