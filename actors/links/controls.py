"""What only the core knows, for frontends that ask."""

from __future__ import annotations

from ...protocol.link import Answer, AuditAnswer, AuditAsked, Done, DrainAsked, Question, ResetAsked, StatsAnswer
from ..core_half import CoreHalf
from ..frontend_half import left_over

SETTLE_S = 5.0
"""How long an audit waits for steps and messages that are under way."""


async def answer(question: Question, half: CoreHalf) -> Answer:
    """The answer, which may take as long as the question allows."""
    core = half.scheduler.core
    match question:
        case AuditAsked():
            if not core.num_live:
                await half.settle(SETTLE_S)
            found = core.audit()
            return AuditAnswer(question.number, found if core.num_live else found + left_over(half.tables()))
        case DrainAsked():
            core.draining = True
            limit_s = float("inf") if question.timeout_s is None else question.timeout_s
            return Done(question.number, await half.settle(limit_s))
        case ResetAsked():
            core.on_reset()
            return Done(question.number)
        case _:
            return StatsAnswer(question.number, core.stats())
