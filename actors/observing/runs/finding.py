"""The request that somebody means: by label, by id as logs print it, or by the number in the id."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from itertools import islice

from ....protocol.errors import ValidationError
from .run import RequestSeen, Run

MOST_CLOSE = 5


def find(run: Run, wanted: str) -> list[RequestSeen]:
    """Those that `wanted` names, the slowest first; labels may repeat. Raises `ValidationError` that says what is close."""
    ways: Sequence[Callable[[RequestSeen], bool]] = (
        lambda request: request.label == wanted,
        lambda request: wanted in (request.shown_id, str(request.request_id)),
        lambda request: request.shown_id.partition("-")[2] == wanted.removeprefix("r"),
    )
    for is_meant in ways:
        found = [request for request in run.requests if is_meant(request)]
        if found:
            return sorted(found, key=lambda request: -request.e2e_s)
    raise ValidationError(_unknown(run, wanted), field="request", value=wanted)


def _unknown(run: Run, wanted: str) -> str:
    if not run.requests:
        return f"{run.name}: there are no requests in it"
    known = dict.fromkeys(name for request in run.requests for name in (request.label, request.shown_id) if name)
    begins = islice((name for name in known if wanted and name.startswith(wanted)), MOST_CLOSE)
    close = list(dict.fromkeys([*begins, *difflib.get_close_matches(wanted, known, n=MOST_CLOSE, cutoff=0.5)]))[:MOST_CLOSE]
    if not close:
        names = run.names()
        slowest = sorted(run.requests, key=lambda request: -request.e2e_s)[:MOST_CLOSE]
        shown = ", ".join(names[one.request_id] for one in slowest)
        return f"no request {wanted!r} among the {len(run.requests):,}; the slowest are {shown}"
    return f"no request {wanted!r} among the {len(run.requests):,}; close to it: {', '.join(close)}"
