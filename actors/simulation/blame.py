"""Whom the deaths of a device are laid to, in words: whoever had a row in a step that was not answered was present.

A token clears. Who has been present twice is suspect and computes alone; who is alone at two more deaths may be failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...protocol.ids import RequestId, SequenceId
from ...protocol.messages import RunStep
from ..scheduling.sequence import CULPRIT_DEATHS, SUSPECT_DEATHS
from .violation import Violation

RULE = "suspects"


class Blame:
    """Deaths by sequence. `excuses` takes those that may be failed for it."""

    def __init__(self, excuses: dict[RequestId, str]) -> None:
        self._excuses = excuses
        self._deaths: dict[SequenceId, int] = {}

    def token(self, seq_id: SequenceId) -> None:
        """It has been given a token."""
        self._deaths.pop(seq_id, None)

    def death(self, present: Collection[SequenceId], alive: dict[SequenceId, RequestId]) -> None:
        """The device died with these in unanswered steps, of which `alive` have not ended."""
        for seq_id, request in alive.items():
            self._deaths[seq_id] = self._deaths.get(seq_id, 0) + 1
            if self._deaths[seq_id] >= CULPRIT_DEATHS:
                if len(present) > 1:
                    raise Violation(
                        RULE, f"sequence {seq_id} will be failed for a death at which {sorted(present)} were present"
                    )
                self._excuses[request] = "the device died of it"

    def check_alone(self, steps: Iterable[RunStep], alive: Collection[SequenceId]) -> None:
        """See that no suspect has company in the steps in flight."""
        if not self._deaths:
            return
        rows = [set(step.seq_ids) for step in steps if step.seq_ids]
        together = set().union(*rows)
        crowd = [seq_id for seq_id in together if seq_id in alive and self._deaths.get(seq_id, 0) >= SUSPECT_DEATHS]
        if crowd and (len(together) > 1 or len(rows) > 1):
            raise Violation(RULE, f"the suspects {crowd} do not compute alone: {rows}")
