"""What `repertory trace` knows of a run, wherever it was read.

Times are seconds since the run's first record (`Run.wall_s` is when that was), unless a comment says otherwise.
"""

from __future__ import annotations

from collections import Counter
from operator import itemgetter
from typing import Literal

import msgspec

from ....protocol.ids import RequestId, incarnation_of, show_request_id
from ....protocol.journey import Journey, Stage
from ....protocol.messages import CopyDirection
from ....protocol.sampling import FinishReason

Ending = FinishReason | Literal["refused", "unknown"]
"""How a request ended; unknown: what was read ends before it."""


MarkKind = Literal["preempted", "host hit", "paused", "aborted"]


class Mark(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Something that was decided about a request, `at_s` after its arrival, in words."""

    at_s: float
    what: MarkKind
    words: str


class RequestSeen(msgspec.Struct, kw_only=True):
    """One request. Times in `journey`, `marks` and `ttft_s` count from `arrival_s`."""

    request_id: RequestId
    label: str
    arrival_s: float
    journey: Journey
    reason: Ending = "unknown"
    is_derived: bool = False
    """The journey was put together from other records: what cannot be told from them is in the stage around it."""
    ttft_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    marks: list[Mark] = []

    @property
    def e2e_s(self) -> float:
        """From arrival to the end, or as far as it is known."""
        return self.journey.total_s

    @property
    def shown_id(self) -> str:
        """Its id as logs print it."""
        return show_request_id(self.request_id)

    @property
    def dominating(self) -> Stage | None:
        """The stage that held it longest."""
        seconds = self.journey.seconds()
        return max(seconds.items(), key=itemgetter(1))[0] if seconds else None


class StepSeen(msgspec.Struct, frozen=True, gc=False):
    """One step: when it ran on the device, of what it was made, and how the scheduler stood when it was planned.

    `start_s` None: it was planned and its end is not there.
    """

    step_id: int
    epoch: int
    planned_s: float
    start_s: float | None
    end_s: float
    waited_s: float
    predicted_s: float | None
    num_prefill_tokens: int
    num_decodes: int
    num_running: int
    num_waiting: int
    num_preempted: int
    num_held: int
    """Device blocks that requests hold."""
    num_cached: int
    """Device blocks that nobody holds and the cache keeps."""
    num_host_used: int

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return 0.0 if self.start_s is None else self.end_s - self.start_s


class CopySeen(msgspec.Struct, frozen=True, gc=False):
    """One copy on its lane."""

    copy_id: int
    direction: CopyDirection
    start_s: float
    end_s: float
    waited_s: float
    num_bytes: int
    ok: bool


class Incident(msgspec.Struct, frozen=True, gc=False):
    """Something that happened to everybody: the device was lost, the cache was emptied."""

    at_s: float
    words: str


class Run(msgspec.Struct, kw_only=True):
    """All that was read. `notes` are sentences about what was not, or not as it should be."""

    name: str
    source: Literal["trace", "logs"]
    engine: str | None = None
    device: str | None = None
    wall_s: float | None = None
    """Seconds since 1970 of time 0."""
    duration_s: float = 0.0
    block_size: int = 0
    num_device_blocks: int = 0
    num_host_blocks: int = 0
    requests: list[RequestSeen] = []
    """In the order of their arrivals."""
    steps: list[StepSeen] = []
    """In the order in which they ran."""
    copies: list[CopySeen] = []
    incidents: list[Incident] = []
    notes: list[str] = []

    def names(self) -> dict[RequestId, str]:
        """What each request is called: its label; without one its id, short where all are of one frontend (r17 is x-17).

        Where several would be called alike, their ids are added.
        """
        is_alone = len({incarnation_of(request.request_id) for request in self.requests}) == 1
        found = {request.request_id: request.label for request in self.requests}
        for request in self.requests:
            if request.label in ("", request.shown_id):
                found[request.request_id] = f"r{request.shown_id.partition('-')[2]}" if is_alone else request.shown_id
        count = Counter(found.values())
        return {
            request.request_id: name if count[name] == 1 else f"{name} ({request.shown_id})"
            for request in self.requests
            for name in [found[request.request_id]]
        }
