"""What a person who watches the engine wants to see, bounded whatever the engine holds: for `repertory top`."""

from __future__ import annotations

import msgspec

from .ids import RequestId
from .journey import Stage
from .metrics import ActorLoad
from .outputs import EngineStats

MOST_PREFIXES = 16
MOST_SLOWEST = 16
"""Requests and prefixes that a view names."""


class SharedPrefix(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prefix that several share: how long it is, who holds it now, and in how many ways the cache knows it to go on.

    `num_host_tokens` of its `num_tokens` have a copy on the host, `num_device_tokens` are on the device.
    """

    num_tokens: int
    num_holders: int
    num_branches: int
    num_device_tokens: int
    num_host_tokens: int


class SlowRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that has not ended: how old it is and what it does now. Tokens are counts of all its sequences."""

    request_id: RequestId
    label: str
    age_s: float
    stage: Stage
    num_prompt_tokens: int
    num_output_tokens: int


class CompanyView(msgspec.Struct, frozen=True, kw_only=True):
    """The company at one moment. Counters only grow: two views make a rate. `at_s` is monotonic."""

    at_s: float
    model_name: str
    device: str
    block_size: int
    running_limit: int
    stats: EngineStats
    num_prefill_tokens: int
    num_generated_tokens: int
    step_s: float
    """Seconds of all steps so far."""
    num_finished: int
    actors: list[ActorLoad] = []
    prefixes: list[SharedPrefix] = []
    """Those that save the most, first."""
    slowest: list[SlowRequest] = []
    """The oldest first."""
    num_frontends: int = 0
