"""What the tests of structured outputs share: a schema, and requests to a real engine."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from repertory import CompletionOutput, Engine, SamplingParams
from repertory.protocol.structured import StructuredOutputs

_PLACES = {"enum": ["house", "tree", "sea", "nothing"]}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


RECORD: dict[str, Any] = _object(
    {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["leaf", "branch", None]},
        "size": _object({"width": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["mm", "cm"]}}),
        "within": {"anyOf": [_PLACES, {"$ref": "#/$defs/place"}]},
    }
) | {
    "$defs": {
        "place": _object(
            {"place": {"type": "string", "maxLength": 8}, "within": {"anyOf": [_PLACES, {"$ref": "#/$defs/place"}]}}
        )
    }
}
"""Nested objects, enumerations, and a recursive reference."""

COMPACT = RECORD | {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}}
"""The same without white space: answers of a model that knows nothing are shorter."""


class Ask(NamedTuple):
    """A request: its prompt, what its text must look like, and its other parameters."""

    prompt: str | list[int]
    wanted: StructuredOutputs | None
    more: dict[str, Any]


def asking(prompt: str | list[int], wanted: StructuredOutputs | None = None, **more: Any) -> Ask:
    return Ask(prompt, wanted, more)


async def answers(engine: Engine, ask: Ask) -> list[CompletionOutput]:
    """All completions of a request."""
    settings = {"temperature": 1.0, "seed": 1, "max_tokens": 300} | ask.more
    params = SamplingParams(structured_outputs=ask.wanted, output_kind="final_only", **settings)
    [output] = [output async for output in engine.generate(ask.prompt, params)]
    return list(output.outputs)


async def answer(engine: Engine, ask: Ask) -> CompletionOutput:
    """Its only one."""
    [completion] = await answers(engine, ask)
    return completion


async def answers_to_all(engine: Engine, asks: list[Ask]) -> list[list[CompletionOutput]]:
    """Those of many requests, sent at once."""
    return list(await asyncio.gather(*(answers(engine, ask) for ask in asks)))
