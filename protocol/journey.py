"""A request's way through the company: which stage held it, from when to when, and because of whom.

The legs of a journey follow one another without gap or overlap, from the arrival to the moment its last text was handed
to its frontend, so the seconds of all stages add up to the whole:

    stage        it begins when                                    it is
    ----------   -----------------------------------------------   -----------------------------------------------
    tokenise     the request arrives                               its prompt is read, after those before it
    queue        the scheduler has it; its reader grants credit    others are before it, or hold all slots
    blocks       it is next and does not fit                       there is not enough KV memory for it yet
    fetch        it is admitted, part of it is on the host         copies bring it in
    prefill      it runs                                           its known tokens are computed, chunk by chunk
    decode       its first token (since it runs) has come          tokens are generated
    preempted    it gives its blocks up for another                it waits to come back
    paused       its reader is `credit_window` tokens behind       it waits for its reader
    restart      the device is lost                                it waits for a new one, and for its turn there
    detokenise   its last token has come                           text is made of it
    send         its text is made                                  its frontend takes it
    stalled      within prefill and decode                         steps lasted longer for other requests' prefills

`stalled` has no legs of its own: it is the part of legs of prefill and decode that other requests' prompts cost, and is
taken off theirs.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .ids import RequestId

Stage = Literal[
    "tokenise",
    "queue",
    "blocks",
    "fetch",
    "prefill",
    "decode",
    "preempted",
    "paused",
    "restart",
    "detokenise",
    "send",
    "stalled",
]

STAGES: tuple[Stage, ...] = Stage.__args__  # type: ignore[attr-defined]  # a Literal's words
"""In the order in which a request meets them."""

MOST_LEGS = 32
"""Legs that are told apart. What comes after is one leg of the stage that it ends in."""

MOST_BLAMED = 5
"""Requests that a journey names, those that cost it most."""


class Leg(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """From `start_s` to `end_s` (seconds since the arrival) in one stage; `stalled_s` of it were others' prefills."""

    stage: Stage
    start_s: float
    end_s: float
    stalled_s: float = 0.0


class Journey(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The legs, in order, and which requests' prefills cost how many seconds of them, the most first."""

    legs: list[Leg]
    stalled_by: list[tuple[RequestId, float]] = []

    @property
    def total_s(self) -> float:
        """From the arrival to the end."""
        return self.legs[-1].end_s if self.legs else 0.0

    def seconds(self) -> dict[Stage, float]:
        """Seconds of each stage that held it for any time. They add up to `total_s`."""
        found: dict[Stage, float] = {}
        for leg in self.legs:
            found[leg.stage] = found.get(leg.stage, 0.0) + leg.end_s - leg.start_s - leg.stalled_s
            found["stalled"] = found.get("stalled", 0.0) + leg.stalled_s
        return {stage: found[stage] for stage in STAGES if found.get(stage, 0.0) > 0.0}
