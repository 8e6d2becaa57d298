"""25 over HTTP. A core that is gone, or stuck, is an error to every client within the bound, and its successor serves them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from repertory.scripts.demos.serve import descendants
from repertory.tests.conformance.server_process import running_server

pytestmark = pytest.mark.alone

HEARTBEAT_S = 2.0
KILLED_S, STUCK_S = 2.0, HEARTBEAT_S + 2.0
"""Within which a loss is to be seen."""
BACK_S = 60.0
LONG = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 20_000, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def server(tiny_model: Path) -> Iterator[tuple[str, int]]:
    settings = {
        "model": tiny_model, "served_model_name": "tiny", "dtype": "float32", "num_threads": 1, "frontends": 2,
        "heartbeat_timeout_s": HEARTBEAT_S, "num_device_blocks": 2000, "kv_offloading_size": 0, "log_level": "error",
    }  # fmt: skip
    with running_server(**settings) as found:
        yield found


def core_of(pid: int) -> int:
    return next(child for child, command in descendants(pid).items() if "core_host" in command)


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[httpx2.AsyncClient]:
    # A new connection for each request: both frontends have their share of them.
    limits = httpx2.Limits(max_keepalive_connections=0)
    async with httpx2.AsyncClient(base_url=url, timeout=30, limits=limits) as client:
        yield client


async def stream_to_its_end(client: httpx2.AsyncClient, has_begun: asyncio.Event) -> tuple[float, list[Any]]:
    """When a stream ended, and its events."""
    events = []
    async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]) if line != "data: [DONE]" else "done")
                has_begun.set()
    return time.monotonic(), events


async def ask_to_its_end(client: httpx2.AsyncClient) -> tuple[float, int]:
    response = await client.post("/v1/completions", json=LONG)
    return time.monotonic(), response.status_code


async def until_healthy(client: httpx2.AsyncClient) -> None:
    async with asyncio.timeout(BACK_S):
        while True:
            answers = [await client.get("/health") for _ in range(16)]  # each may meet another frontend
            if all(answer.status_code == 200 for answer in answers):
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("how", "bound_s"), [(signal.SIGKILL, KILLED_S), (signal.SIGSTOP, STUCK_S)], ids=["killed", "stuck"])
async def test_every_client_hears_of_a_lost_core_and_its_successor_serves(
    server: tuple[str, int], how: signal.Signals, bound_s: float
) -> None:
    url, pid = server
    async with client_of(url) as client:
        begun = [asyncio.Event() for _ in range(4)]
        streams = [asyncio.ensure_future(stream_to_its_end(client, event)) for event in begun]
        whole = [asyncio.ensure_future(ask_to_its_end(client)) for _ in range(3)]
        await asyncio.gather(*(event.wait() for event in begun))
        os.kill(core_of(pid), how)
        lost = time.monotonic()
        for ended, events in await asyncio.gather(*streams):
            assert ended - lost < bound_s
            assert events[-1]["error"]["code"] in (503, "503", "engine_dead"), events[-1]
            assert "done" not in events
        for ended, status in await asyncio.gather(*whole):
            assert ended - lost < bound_s
            assert status == 503
        began = time.monotonic()
        refused = await client.post("/v1/completions", json=LONG)
        health = await client.get("/health")
        assert (refused.status_code, health.status_code) == (503, 503)
        assert time.monotonic() - began < 1.0, "at once"
        await until_healthy(client)
        answer = await client.post("/v1/completions", json={**LONG, "max_tokens": 3})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 3
