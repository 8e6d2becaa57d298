"""One run as data: the engine, who comes, and what goes wrong. Everything else follows from it and its seed.

A scenario can be cut (`without`) and run again, so a failing one is made as small as it can be (`shrinking.py`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ...protocol.config import EngineConfig
from ...protocol.sampling import SamplingParams

FaultKind = Literal["die", "hang", "jump", "stall", "crash", "poison", "reset", "shared"]


class Visitor(msgspec.Struct, frozen=True, kw_only=True):
    """A client and its one request. Times are seconds of the run, or seconds after the request came (`leaves_s`)."""

    name: int
    """Its number, which stays its own when others are cut."""
    comes_s: float
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    text_stop: int | None = None
    """Its text ends at two tokens whose sum is a multiple of this: what a stop string is to a text."""
    priority: int = 0
    tenant: str | None = None
    cache_salt: str | None = None
    read_s: float = 0.0
    """Seconds it takes to read a token."""
    reads: int | None = None
    """Tokens of each sequence after which it reads no more; None: it reads to the end."""
    leaves_s: float | None = None
    leaves_after: int | None = None
    """It goes once it has been given so many tokens."""
    follows: int | None = None
    """The visitor whose end it waits for, to go on with that one's prompt and answer before its own prompt."""
    kills: bool = False
    """No device survives a step that computes it."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that goes wrong at `at_s`.

    die      the device host ends, with all that it was told
    hang     a timeline of the device (`what`: "step", "out" or "in") begins nothing any more
    jump     the clock leaps forward by `seconds`
    stall    the scheduler's loop is blocked for `seconds`
    crash    the detokenizer crashes at its next message and is started again
    poison   rows of visitor `whom` turn NaN: its next one, or (`what`: "always") all from now on
    reset    the cache is to be forgotten
    shared   another process has come to the device
    """

    at_s: float
    kind: FaultKind
    what: str = ""
    seconds: float = 0.0
    whom: int = 0


class Weather(msgspec.Struct, frozen=True, kw_only=True):
    """How long things take, and how often copies go wrong. Seconds; `spread` is the largest share by which a time varies."""

    step_s: float = 0.01
    token_s: float = 0.0
    row_s: float = 0.0
    copy_s: float = 0.001
    copy_rate: float = 1e6
    spread: float = 0.0
    delay_s: float = 0.0
    """The longest that a message between actors is on its way."""
    copy_failures: float = 0.0
    copy_stalls: float = 0.0
    """Share of copies that take a hundred times as long."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A seed, an engine (`config`, with the sizes of a simulated device), visitors, faults."""

    seed: int
    config: EngineConfig
    num_device_blocks: int
    num_host_blocks: int = 0
    vocab_size: int = 50
    max_model_len: int = 100_000
    has_reserve: bool = True
    """Whether admission leaves blocks free for the growth of what runs; without, memory runs out often."""
    is_paced: bool = True
    """Whether steps are planned as late as can be; else as early as is allowed."""
    weather: Weather = Weather()
    visitors: tuple[Visitor, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def size(self) -> int:
        """Visitors and faults."""
        return len(self.visitors) + len(self.faults)

    def kept(self, visitors: tuple[Visitor, ...], faults: tuple[Fault, ...]) -> Scenario:
        """The same with these only."""
        return msgspec.structs.replace(self, visitors=visitors, faults=faults)
