"""Many requests of every kind, and what each gives alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from repertory import Engine, RequestStream, SamplingParams
from repertory.tests.engine.stage import LETTERS

LIMIT_S = 120.0
MARK = 5
"""A prompt token that no other prompt here has."""
ORDINARY = [token for token in LETTERS if token != MARK]


class Result(NamedTuple):
    """A stream, joined."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None


Request = tuple[list[int], SamplingParams]


def crowd(count: int, *, max_tokens: int = 24, seed: int = 0, **params: Any) -> list[Request]:
    """Greedy and seeded requests, with and without stop strings, some sharing their beginnings."""
    draw = random.Random(f"crowd {count} {seed}")
    stems = [draw.choices(ORDINARY, k=20) for _ in range(3)]
    requests = []
    for number in range(count):
        prompt = draw.choice(stems)[: draw.randint(0, 20)] + draw.choices(ORDINARY, k=draw.randint(1, 12))
        kind: dict[str, Any] = {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "seed": number}
        stop = [draw.choice("aeiou"), draw.choice("0123456789")] if number % 3 == 0 else None
        length = max_tokens - number % 5
        requests.append((prompt, SamplingParams(max_tokens=length, stop=stop, output_kind="delta", **kind, **params)))
    return requests


async def read(stream: RequestStream) -> Result:
    """Read a stream of deltas to its end, which must come once and last."""
    text, token_ids, outputs = "", [], []
    async for output in stream:
        outputs.append(output)
        text += output.outputs[0].text
        token_ids += output.outputs[0].token_ids
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    last = outputs[-1].outputs[0]
    return Result(token_ids, text, last.finish_reason, last.stop_reason)


def begin(engine: Engine, requests: Sequence[Request]) -> list[asyncio.Task[Result]]:
    """Submit requests now; each is read by a task of its own."""
    return [asyncio.ensure_future(read(engine.generate(*request))) for request in requests]


async def results(tasks: Sequence[asyncio.Task[Result]], *, limit_s: float = LIMIT_S) -> list[Result]:
    """What they brought, each within the time."""
    async with asyncio.timeout(limit_s):
        return list(await asyncio.gather(*tasks))


async def alone(model: Path, requests: Sequence[Request], **settings: Any) -> list[Result]:
    """What each request gives when nothing runs beside it, nothing is cached, and nothing fails."""
    config = {"worker": "inline", "enable_prefix_caching": False, "max_num_seqs": 1, **settings}
    found = []
    async with Engine(model=str(model), **config) as engine:
        for prompt, params in requests:
            stream = engine.generate(prompt, msgspec.structs.replace(params, output_kind="delta"))
            found.append(await read(stream))
    return found
