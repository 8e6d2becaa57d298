"""The demo model at temperature 1 under a schema: every answer that ends parses and validates.

Nothing makes a small model end a recursion, so a few more answers are asked for than are wanted: `max_tokens` cuts some.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import jsonschema
import pytest

from repertory import CompletionOutput, Engine, EngineConfig, SamplingParams
from repertory.gpu.models import gguf
from repertory.gpu.models.source import resolve_model
from repertory.protocol.structured import StructuredOutputs
from repertory.tests.sampling.structured_engine import RECORD

MAX_TOKENS = 110
THINGS = ["a garden", "a ship", "a library", "a kitchen", "an old tree"]


@pytest.fixture(scope="module")
def demo_model(request: pytest.FixtureRequest) -> Path:
    """Kept between sessions for as long as the converter's source is the same."""
    version = hashlib.sha256(Path(gguf.__file__).read_bytes()).hexdigest()[:8]
    return resolve_model("demo", cache_dir=request.config.cache.mkdir(f"converted-{version}"))


async def records(model: Path, seeds: range) -> list[CompletionOutput]:
    """An answer for each seed."""
    config = EngineConfig(
        model=str(model), device="cpu", max_model_len=512, num_device_blocks=800, kv_offloading_size=0, log_level="error"
    )
    async with Engine(config) as engine:

        async def record(seed: int) -> CompletionOutput:
            content = f"Describe {THINGS[seed % len(THINGS)]} and its parts as a short JSON record."
            params = SamplingParams(
                temperature=1.0, seed=seed, max_tokens=MAX_TOKENS, output_kind="final_only",
                structured_outputs=StructuredOutputs(json=RECORD),
            )  # fmt: skip
            [output] = [out async for out in engine.generate([{"role": "user", "content": content}], params)]
            return output.outputs[0]

        found = await asyncio.gather(*map(record, seeds))
        assert await engine.audit() == []
    return list(found)


@pytest.mark.parametrize(
    ("num_wanted", "seeds"),
    [(10, range(12)), pytest.param(100, range(100, 225), marks=pytest.mark.slow)],
    ids=["10", "100"],
)
async def test_answers_at_temperature_1_parse_and_validate(demo_model: Path, num_wanted: int, seeds: range) -> None:
    found = await records(demo_model, seeds)
    ended = [one for one in found if one.finish_reason == "stop"]
    assert len(ended) >= num_wanted
    values = [json.loads(one.text) for one in ended]
    for value in values:
        jsonschema.validate(value, RECORD)
    assert all(len(one.token_ids) == MAX_TOKENS and one.text.startswith("{") for one in found if one not in ended)
    assert len({one.text for one in found}) > len(found) * 0.8, "they are drawn"
    assert any(isinstance(value["within"], dict) for value in values), "and some go into the recursion"
