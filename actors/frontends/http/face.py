"""What the HTTP frontend asks of an engine, wherever that runs: `Engine` fits, and so does a connected one."""

from __future__ import annotations

from typing import Protocol

from ....protocol.capacity import Capacity
from ....protocol.config import EngineConfig
from ....protocol.outputs import EngineStats
from ....protocol.sampling import SamplingParams
from ...text.prompts import PromptReader
from ..engine import Prompt
from ..stream import RequestStream


class EngineFace(Protocol):
    """The part of an engine's public names that requests over HTTP need."""

    config: EngineConfig

    @property
    def capacity(self) -> Capacity:
        """What the device offers."""

    @property
    def prompt_reader(self) -> PromptReader:
        """What turns prompts into ids; used in threads."""

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        trace_context: dict[str, str] | None = None,
    ) -> RequestStream:
        """Submit a request and return its stream. Raises `EngineDeadError` where there is nobody to submit it to."""

    async def stats(self) -> EngineStats:
        """A consistent snapshot."""

    async def check_health(self) -> None:
        """Raise `EngineDeadError` unless the engine serves."""
