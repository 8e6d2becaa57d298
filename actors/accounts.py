"""The canonical line of each request: kept from its end in the scheduler until its last text has been handed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..protocol.ids import RequestId, incarnation_of, show_request_id
from ..protocol.messages import Closed
from .scheduling.journeys import handed_over
from .scheduling.reports import Finished

Write = Callable[[Finished], None]
"""Writes an account down, whose journey is complete."""


class Accounts:
    """Accounts that wait for their `Closed`. One is written once, however it came to its end."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: dict[RequestId, Finished] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def keep(self, account: Finished) -> None:
        """A request has ended as far as the scheduler goes."""
        self._waiting[account.request_id] = account

    def on_closed(self, message: Closed, now: float) -> None:
        """Their last texts are out: not later than `now`, whatever a frontend says."""
        handed = dict(zip(message.request_ids, message.handed, strict=False))
        for request_id in message.request_ids:
            account = self._waiting.pop(request_id, None)
            if account is not None:
                moments = handed.get(request_id)
                self._write(account if moments is None else complete(account, *(min(moment, now) for moment in moments)))

    def on_frontend_lost(self, incarnation: int) -> None:
        """Nobody will say more of the requests that it made."""
        for request_id in [request_id for request_id in self._waiting if incarnation_of(request_id) == incarnation]:
            self._write(self._waiting.pop(request_id))

    def close(self) -> None:
        """The scheduler stops: what is known is written."""
        while self._waiting:
            self._write(self._waiting.popitem()[1])


def complete(account: Finished, made_s: float, sent_s: float) -> Finished:
    """The account of a request whose last text was made and handed over at these moments."""
    if account.journey is None:
        return account
    journey = handed_over(account.journey, made_s - account.arrival_s, sent_s - account.arrival_s)
    return msgspec.structs.replace(account, journey=journey, e2e_s=journey.total_s)


def line_of(account: Finished) -> dict[str, Any]:
    """The fields of `request.finished`. Seconds of stages that took none are left out."""
    fields = msgspec.structs.asdict(account)
    for name in ("journey", "problem", "arrival_s", "queue_s", "prefill_s", "decode_s"):
        del fields[name]
    fields["request_id"] = show_request_id(account.request_id)
    journey = account.journey
    if journey is not None:
        fields |= {f"{stage}_s": seconds for stage, seconds in journey.seconds().items()}
        fields["legs"] = [
            [leg.stage, *(round(moment, 6) for moment in (leg.start_s, leg.end_s, leg.stalled_s))] for leg in journey.legs
        ]
        if journey.stalled_by:
            fields["stalled_by"] = [
                [show_request_id(request_id), round(seconds, 6)] for request_id, seconds in journey.stalled_by
            ]
    return rounded(fields)


def rounded(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a line, seconds to the microsecond."""
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}
