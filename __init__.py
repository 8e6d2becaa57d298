"""repertory: an LLM inference engine made of independent asyncio actors.

    async with Engine(model="demo") as engine:
        async for out in engine.generate("The capital of France is"):
            print(out.outputs[0].text)

Names are imported when they are first used, so that `import repertory` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .actors.frontends.engine import Engine as Engine
    from .actors.frontends.llm import LLM as LLM
    from .actors.frontends.remote import connect as connect
    from .actors.frontends.stream import RequestStream as RequestStream
    from .protocol.config import EngineConfig as EngineConfig
    from .protocol.errors import ConfigError as ConfigError
    from .protocol.errors import EngineDeadError as EngineDeadError
    from .protocol.errors import EngineDrainingError as EngineDrainingError
    from .protocol.errors import EngineError as EngineError
    from .protocol.errors import ModelLoadError as ModelLoadError
    from .protocol.errors import NeverFitsError as NeverFitsError
    from .protocol.errors import QueueFullError as QueueFullError
    from .protocol.errors import RepertoryError as RepertoryError
    from .protocol.errors import RequestError as RequestError
    from .protocol.errors import RequestFailedError as RequestFailedError
    from .protocol.errors import UnsupportedError as UnsupportedError
    from .protocol.errors import ValidationError as ValidationError
    from .protocol.outputs import BeamSearchOutput as BeamSearchOutput
    from .protocol.outputs import BeamSearchSequence as BeamSearchSequence
    from .protocol.outputs import BlockCounts as BlockCounts
    from .protocol.outputs import CompletionOutput as CompletionOutput
    from .protocol.outputs import EngineStats as EngineStats
    from .protocol.outputs import Logprob as Logprob
    from .protocol.outputs import RequestMetrics as RequestMetrics
    from .protocol.outputs import RequestOutput as RequestOutput
    from .protocol.sampling import BeamSearchParams as BeamSearchParams
    from .protocol.sampling import SamplingParams as SamplingParams
    from .protocol.structured import StructuredOutputs as StructuredOutputs

_HOMES = {
    "actors.frontends.engine": ("Engine",),
    "actors.frontends.llm": ("LLM",),
    "actors.frontends.remote": ("connect",),
    "actors.frontends.stream": ("RequestStream",),
    "protocol.config": ("EngineConfig",),
    "protocol.errors": (
        "ConfigError",
        "EngineDeadError",
        "EngineDrainingError",
        "EngineError",
        "ModelLoadError",
        "NeverFitsError",
        "QueueFullError",
        "RepertoryError",
        "RequestError",
        "RequestFailedError",
        "UnsupportedError",
        "ValidationError",
    ),
    "protocol.outputs": (
        "BeamSearchOutput",
        "BeamSearchSequence",
        "BlockCounts",
        "CompletionOutput",
        "EngineStats",
        "Logprob",
        "RequestMetrics",
        "RequestOutput",
    ),
    "protocol.sampling": ("BeamSearchParams", "SamplingParams"),
    "protocol.structured": ("StructuredOutputs",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
