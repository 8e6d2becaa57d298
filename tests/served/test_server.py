"""`repertory serve`: a parent, a core host, a device host and frontend hosts, any of which may die."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from repertory import SamplingParams, connect
from repertory.actors.commands.app import build_app
from repertory.tests.engine.stage import greedy, last_of, prompt_of

from .conftest import stats_until
from .servers import Server, until

pytestmark = pytest.mark.alone

StartServer = Callable[..., Any]
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, output_kind="delta")


async def test_the_start_line_names_the_url_and_all_frontends_serve_it(start_server: StartServer) -> None:
    server: Server = await start_server(frontends=2)
    assert server.url.startswith("http://127.0.0.1:")
    assert server.events("serve.ready")[0]["url"] == server.url
    async with server.client() as client:
        answers = await asyncio.gather(*(server.generate(client, prompt_of(9, seed), 5) for seed in range(20)))
        assert all(last == "end length" and len(token_ids) == 5 for token_ids, last in answers)
        pids = set()
        async with asyncio.timeout(60):
            while len(pids) < 2:
                burst = await asyncio.gather(*(client.get("/health") for _ in range(20)))
                pids |= {response.json()["pid"] for response in burst}
        assert pids == {frontend.pid for frontend in server.frontends}
    async with connect(server.endpoint) as engine:  # a Python frontend beside them
        assert (await last_of(engine.generate(prompt_of(9), greedy()))).finished
        assert await engine.audit() == []
    assert len(server.everybody) == 5
    assert await server.end() == 0


async def test_a_core_host_imports_no_model_library(start_server: StartServer) -> None:
    server: Server = await start_server()
    libraries = " ".join(mapped.path for mapped in server.core.memory_maps())
    assert "zmq" in libraries
    for name in ("torch", "tokenizers", "transformers", "uvicorn"):
        assert f"/{name}/" not in libraries


async def test_a_killed_frontend_costs_its_own_clients_and_is_started_again(start_server: StartServer) -> None:
    server: Server = await start_server(frontends=2)
    first, second = server.frontends
    async with server.client() as client:
        streams = [asyncio.ensure_future(server.generate(client, prompt_of(9, seed), 3000)) for seed in range(8)]
        await until(lambda: len(server.events("frontend.joined")) == 2)
        await asyncio.sleep(0)
        first.kill()
        ends = [last for _, last in await asyncio.gather(*streams)]
        assert set(ends) <= {"end length", "cut"}
        ready = await server.event("process.ready", 4)
        assert ready["process"] == "frontend host 1"
        assert second.is_running()
        answers = await asyncio.gather(*(server.generate(client, prompt_of(9, seed), 5) for seed in range(10)))
        assert [last for _, last in answers] == ["end length"] * 10
        assert await server.audit(client) == []
    (ended,) = server.events("process.ended")
    assert (ended["process"], ended["reason"]) == ("frontend host 1", "it ended with signal SIGKILL")


async def test_a_killed_core_ends_streams_with_an_error_and_its_successor_serves(start_server: StartServer) -> None:
    server: Server = await start_server(frontends=2)
    async with server.client() as client:
        streams = [asyncio.ensure_future(server.generate(client, prompt_of(9, seed), None)) for seed in range(6)]
        async with connect(server.endpoint) as engine:
            await stats_until(engine, lambda stats: stats.num_running == 6)
        started = time.monotonic()
        server.core.kill()
        assert {last for _, last in await asyncio.gather(*streams)} == {"error EngineDeadError"}
        assert time.monotonic() - started < 2.0
        assert await server.status(client) in (200, 503)
        await server.event("core.connected", 4)
        answers = await asyncio.gather(*(server.generate(client, prompt_of(9, seed), 5) for seed in range(10)))
        assert [last for _, last in answers] == ["end length"] * 10
        assert await server.audit(client) == []
    assert len(server.frontends) == 2


async def test_while_there_is_no_core_clients_get_errors_at_once(start_server: StartServer) -> None:
    server: Server = await start_server(heartbeat_timeout_s=2.0)
    async with server.client() as client:
        server.core.suspend()
        await server.event("core.lost")
        started = time.monotonic()
        # The parent notices the same silence, so a new core may be there at any moment.
        assert await server.status(client) in (200, 503)
        assert time.monotonic() - started < 1.0
        await server.event("core.connected", 2)
        assert "silent" in server.events("process.ended")[0]["reason"]
        assert (await server.generate(client, prompt_of(9), 5))[1] == "end length"


async def test_a_killed_device_is_only_a_pause(start_server: StartServer) -> None:
    server: Server = await start_server(frontends=2)
    async with server.client() as client:
        expected = [await server.generate(client, prompt_of(9, seed), 300) for seed in range(4)]
        streams = [asyncio.ensure_future(server.generate(client, prompt_of(9, seed), 300)) for seed in range(4)]
        await until(lambda: len(server.events("request.finished")) >= 4)
        server.device.kill()
        assert await asyncio.gather(*streams) == expected
        assert await server.audit(client) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("whom", ["the parent", "everybody"])
async def test_a_signal_finishes_what_runs_and_refuses_what_is_new(start_server: StartServer, number: int, whom: str) -> None:
    server: Server = await start_server(frontends=2)
    async with server.client() as client:
        async with connect(server.endpoint) as engine:
            held = engine.generate(prompt_of(9, 50), ENDLESS)  # what keeps the server from ending before it is looked at
            await anext(held)
            running = [asyncio.ensure_future(server.generate(client, prompt_of(9, seed), 2000)) for seed in range(4)]
            await stats_until(engine, lambda stats: stats.num_running + stats.num_paused == 5)
            for process in server.everybody if whom == "everybody" else server.everybody[:1]:
                process.send_signal(number)
            await server.event("serve.drain")
            async with asyncio.timeout(60):
                # One frontend may have heard of it before the other: then it is the core that refuses.
                while (end := (await server.generate(client, prompt_of(9), 5))[1]) != "status 503":
                    assert end in ("end length", "error EngineDrainingError")
            await held.aclose()
        assert [last for _, last in await asyncio.gather(*running)] == ["end length"] * 4
    assert await server.ended() == 0
    assert server.events("process.ended") + server.events("device.lost") == []


async def test_draining_ends_at_its_deadline(start_server: StartServer) -> None:
    server: Server = await start_server(drain_s=0.5)
    async with server.client() as client:
        stream = asyncio.ensure_future(server.generate(client, prompt_of(9), None))
        await until(lambda: bool(server.frontends))
        async with connect(server.endpoint) as engine:
            await stats_until(engine, lambda stats: stats.num_running == 1)
            started = time.monotonic()
            assert await server.end() == 0
            assert time.monotonic() - started < 6.0
        assert (await stream)[1] in ("error EngineDeadError", "cut", "end length")


async def test_a_second_signal_ends_all_at_once(start_server: StartServer) -> None:
    server: Server = await start_server(frontends=2, drain_s=60.0)
    async with connect(server.endpoint) as engine:
        await anext(engine.generate(prompt_of(9), ENDLESS))
        held = engine.generate(prompt_of(9, 1), ENDLESS)
        await anext(held)
        server.process.send_signal(signal.SIGINT)
        await server.event("serve.drain")
        started = time.monotonic()
        assert await server.end(signal.SIGINT) == 130
        assert time.monotonic() - started < 2.0


@pytest.mark.parametrize("state", ["running", "with a stopped core", "with a stopped device", "with a stopped frontend"])
async def test_no_orphan_is_left_when_the_parent_is_killed(start_server: StartServer, state: str) -> None:
    server: Server = await start_server(frontends=2)
    everybody = server.everybody
    stopped = {"with a stopped core": server.core, "with a stopped device": server.device}
    if state == "with a stopped frontend":
        server.frontends[0].suspend()
    elif state in stopped:
        stopped[state].suspend()
    server.process.kill()
    await server.ended()
    await until(lambda: not any(process.is_running() and process.status() != "zombie" for process in everybody))


async def test_a_port_that_is_taken_stops_the_start_at_once(start_server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        started = time.monotonic()
        server: Server = await start_server(port=taken.getsockname()[1])
        assert await server.ended() == 1
    assert "ConfigError: port: cannot listen on 127.0.0.1 port" in server.words
    assert time.monotonic() - started < 5.0


async def test_a_model_that_is_not_there_stops_the_start_in_the_cores_own_words(
    start_server: StartServer, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    server: Server = await start_server(model=str(tmp_path))
    assert await server.ended() == 1
    assert "config.json" in server.words
    assert "ModelLoadError" in server.words


async def test_a_core_that_cannot_stay_up_ends_the_server(start_server: StartServer) -> None:
    server: Server = await start_server(max_restarts=1)
    for life in (1, 2):
        await server.event("process.ready", 1 + life)
        server.core.kill()
        if life == 1:
            await until(lambda: len([line for line in server.events("process.ready") if line["process"] == "core host"]) == 2)
    assert await server.ended() == 1
    assert "ended too often" in server.words


def test_the_command_line_has_the_verb_and_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        build_app()(["serve", "--help"])
    shown = capsys.readouterr().out
    for flag in ("--frontends", "--port", "--api-key", "--drain-timeout-s", "MODEL"):
        assert flag in shown
