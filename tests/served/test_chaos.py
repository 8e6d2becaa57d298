"""Two hundred requests over two frontend processes, while what computes them dies twenty times in every way there is."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from repertory import Engine, SamplingParams
from repertory.tests.engine.stage import LETTERS
from repertory.tests.supervision.faulty_host import VARIABLE, Fault, Plan

from .conftest import COMPUTED, StartServer
from .servers import Server

NUM_REQUESTS = 200
NUM_DEATHS = 20
LIMIT_S = 600.0
WAYS = [("kill", "before"), ("kill", "during"), ("kill", "after"), ("stop", "during"), ("starve", "before"), ("raise", "after")]

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(900)]


def requests(seed: int) -> list[tuple[list[int], int]]:
    """Prompts, a third of them with a common beginning, and how many tokens they ask for."""
    draw = random.Random(f"chaos {seed}")
    stem = draw.choices(LETTERS, k=30)
    return [
        ((stem if number % 3 == 0 else []) + draw.choices(LETTERS, k=draw.randint(1, 40)), draw.randint(20, 60))
        for number in range(NUM_REQUESTS)
    ]


def faults(seed: int) -> list[Fault]:
    """One in each life, early enough to hit requests in flight, late enough for each life to bring somebody on."""
    draw = random.Random(f"faults {seed}")
    ways = [WAYS[number % len(WAYS)] for number in range(NUM_DEATHS)]
    draw.shuffle(ways)
    return [Fault(how, when, life=life, step=draw.randint(4, 16)) for life, (how, when) in enumerate(ways, 1)]  # type: ignore[arg-type]


async def alone(model: Path, asked: list[tuple[list[int], int]]) -> list[list[int]]:
    """The token ids that each request gives when nothing runs beside it and nothing fails."""
    found = []
    config: dict[str, Any] = {**COMPUTED, "worker": "inline", "enable_prefix_caching": False, "max_num_seqs": 1}
    async with Engine(model=str(model), **config) as engine:
        for prompt, max_tokens in asked:
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind="final_only")
            outputs = [output async for output in engine.generate(prompt, params)]
            found.append(outputs[-1].outputs[0].token_ids)
    return found


async def read(client: httpx2.AsyncClient, prompt: list[int], max_tokens: int) -> tuple[list[int], list[str]]:
    """An answer's token ids, and every other line of it."""
    token_ids: list[int] = []
    others: list[str] = []
    async with client.stream("POST", "/generate", json={"prompt": prompt, "max_tokens": max_tokens}) as response:
        async for line in response.aiter_lines():
            if line.startswith("["):
                token_ids += json.loads(line)
            else:
                others.append(line)
    return token_ids, others


@pytest.mark.parametrize("seed", range(2))
async def test_every_request_ends_as_it_would_alone(
    start_server: StartServer, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    asked = requests(seed)
    expected = await alone(tiny_model, asked)
    (tmp_path / "plan").write_bytes(msgspec.json.encode(Plan(faults(seed))))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "plan"))
    server: Server = await start_server(
        kind="faulty", device="cpu", frontends=2, heartbeat_timeout_s=3.0, max_num_seqs=16, num_device_blocks=160
    )
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(base_url=server.url, timeout=LIMIT_S, limits=limits) as client:
        async with asyncio.timeout(LIMIT_S):
            found = await asyncio.gather(*(read(client, *request) for request in asked))
        for (token_ids, others), reference in zip(found, expected, strict=True):
            assert token_ids == reference
            assert others == ["end length"]
        deeds = (tmp_path / "deeds").read_text().split()
        assert len(deeds) == NUM_DEATHS
        assert await server.audit(client) == []
    finished = server.events("request.finished")
    assert len(finished) == NUM_REQUESTS
    assert len({line["request_id"].split("-")[0] for line in finished}) == 2, "both frontends had a part in it"
    assert len(server.events("device.lost")) == NUM_DEATHS
    assert await server.end() == 0
