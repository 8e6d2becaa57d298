"""What a frontend process and a core process say to each other besides the actors' own messages.

    frontend --Hello--> core --Welcome--> frontend      (or Dismissed, and why)
    both     --Beat-->  both                            (alive; how much has been read)
    frontend --StatsAsked, AuditAsked, ResetAsked, DrainAsked--> core --StatsAnswer, AuditAnswer, Done--> frontend
    frontend --MetricsAsked, ViewAsked--> core --MetricsAnswer, ViewAnswer--> frontend
    frontend --Goodbye--> core
    core     --Dismissed--> frontend                    (it ends, or has given this frontend up)

Every frame of the link names the core's epoch, a number drawn at its start: what was meant for a core that is gone,
or comes from it, is dropped.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .capacity import Capacity
from .config import SECRETS, EngineConfig
from .messages import Message
from .metrics import ActorLoads, CoreMetrics
from .outputs import EngineStats
from .view import CompanyView

Incarnation = Annotated[int, Meta(ge=0, lt=2**31)]
NumBytes = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


class Hello(Message, frozen=True):
    """A frontend asks to be served. All its ids carry `incarnation`; both sides must speak the same `version`."""

    incarnation: Incarnation
    version: str


class Welcome(Message, frozen=True):
    """It is served from here on: what it has to know of the core. The configuration has no secrets."""

    config: EngineConfig
    capacity: Capacity
    model_dir: str


class Beat(Message, frozen=True):
    """The sender's loop is alive, and has taken in so many bytes of this link's frames since it began.

    A frontend also says how its actors are, for whoever looks at the whole company.
    """

    num_taken_bytes: NumBytes
    actors: ActorLoads = []


class Dismissed(Message, frozen=True):
    """The core serves this frontend no more: all its requests have ended."""

    reason: str


class Goodbye(Message, frozen=True):
    """The frontend goes. What it still had is aborted."""


class StatsAsked(Message, frozen=True):
    """Asks for a snapshot."""

    number: int


class AuditAsked(Message, frozen=True):
    """Asks what does not add up in the core."""

    number: int


class ResetAsked(Message, frozen=True):
    """Asks to forget cached prefixes."""

    number: int


class DrainAsked(Message, frozen=True):
    """Asks to refuse what is new and wait, `timeout_s` seconds at most (None: for ever), for what runs."""

    number: int
    timeout_s: Seconds | None


class MetricsAsked(Message, frozen=True):
    """Asks for all that is counted."""

    number: int


class ViewAsked(Message, frozen=True):
    """Asks what there is to see."""

    number: int


class StatsAnswer(Message, frozen=True):
    """A consistent snapshot."""

    number: int
    stats: EngineStats


class AuditAnswer(Message, frozen=True):
    """What does not add up; empty when all is well."""

    number: int
    problems: list[str]


class MetricsAnswer(Message, frozen=True):
    """All that is counted."""

    number: int
    metrics: CoreMetrics


class ViewAnswer(Message, frozen=True):
    """What there is to see."""

    number: int
    view: CompanyView


class NotAnswered(Message, frozen=True):
    """The core cannot say: looking at itself failed. It serves on."""

    number: int
    reason: str


class Done(Message, frozen=True):
    """What was asked for has been done, or (`ok` false) not in time."""

    number: int
    ok: bool = True


Question = StatsAsked | AuditAsked | ResetAsked | DrainAsked | MetricsAsked | ViewAsked
Answer = StatsAnswer | AuditAnswer | Done | MetricsAnswer | ViewAnswer | NotAnswered


def without_secrets(config: EngineConfig) -> EngineConfig:
    """The configuration as it may travel."""
    return msgspec.structs.replace(config, **dict.fromkeys(SECRETS))
