"""What only the core knows, for frontends that ask."""

from __future__ import annotations

from ...protocol.link import (
    Answer,
    AuditAnswer,
    AuditAsked,
    Done,
    DrainAsked,
    MetricsAnswer,
    MetricsAsked,
    NotAnswered,
    Question,
    ResetAsked,
    StatsAnswer,
    ViewAnswer,
    ViewAsked,
)
from ..core_half import CoreHalf, left_over
from ..observing.logs import logger

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
            half.scheduler.drain()
            limit_s = float("inf") if question.timeout_s is None else question.timeout_s
            return Done(question.number, await half.settle(limit_s))
        case ResetAsked():
            half.scheduler.reset_cache()
            return Done(question.number)
        case MetricsAsked() | ViewAsked():
            return _look(question, half)
        case _:
            return StatsAnswer(question.number, core.stats())


def _look(question: MetricsAsked | ViewAsked, half: CoreHalf) -> Answer:
    """Whatever goes wrong in it, requests do not notice."""
    try:
        if isinstance(question, MetricsAsked):
            return MetricsAnswer(question.number, half.metrics())
        return ViewAnswer(question.number, half.view())
    except Exception as error:
        logger("link").warning("metrics.failed", reason=repr(error), exc_info=error)
        return NotAnswered(question.number, repr(error))
