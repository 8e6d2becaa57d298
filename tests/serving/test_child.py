"""One life of a child: how its start, its silence, its words and its end are seen."""

from __future__ import annotations

import asyncio
import sys
import textwrap
import time

import psutil
import pytest

from repertory.actors.serving.child import Child
from repertory.actors.serving.lines import CoreOrders, Failed, FrontendOrders, Ready, as_line, decode_to_child, decode_to_parent
from repertory.actors.serving.post import Post
from repertory.protocol.config import EngineConfig
from repertory.protocol.errors import EngineDeadError, ModelLoadError, Problem

ORDERS = CoreOrders("ipc:///nowhere", EngineConfig(model="m"))
PATIENCE_S = 0.5
READY = as_line(Ready()).decode().strip()
FAILED = as_line(Failed(Problem("ModelLoadError", "no such model", "model"))).decode().strip()


def child(program: str, patience_s: float = PATIENCE_S) -> Child:
    """A child that runs `program`, with `say(text)` for a line to its parent."""
    begin = "import os, sys, time\ndef say(text):\n    print(text, flush=True)\n"
    return Child([sys.executable, "-c", begin + textwrap.dedent(program)], ORDERS, patience_s=patience_s)


async def ended(one: Child) -> str:
    """Start it and wait for its end."""
    await one.start()
    return await asyncio.wait_for(one.ended(), 60)


async def test_its_first_line_is_its_orders_and_its_last_words_are_remembered() -> None:
    one = child(f"orders = sys.stdin.readline()\nif 'ipc:///nowhere' in orders:\n    say({FAILED!r})\nsys.exit(1)")
    assert await ended(one) == "no such model"
    assert one.problem == Problem("ModelLoadError", "no such model", "model")
    assert not one.ready.done()


async def test_garbage_on_its_output_is_dropped_and_logged(log_lines: list[dict]) -> None:
    one = child(f"say('hello'); say('x' * (3 << 20)); say('[1]'); say({READY!r})")
    assert await ended(one) == "it ended with status 0"
    assert one.ready.done()
    assert len([line for line in log_lines if line["event"] == "link.bad_message"]) >= 3


async def test_one_that_has_served_and_falls_silent_is_ended() -> None:
    one = child(f"say({READY!r}); time.sleep(60)")
    started = time.monotonic()
    assert "silent" in await ended(one)
    assert time.monotonic() - started < 10
    assert one.gone.is_set()


async def test_one_that_is_slow_to_start_is_not() -> None:
    one = child(f"time.sleep(4 * {PATIENCE_S}); say({READY!r})")
    assert await ended(one) == "it ended with status 0"


async def test_one_that_ignores_the_end_of_its_input_is_ended_by_force() -> None:
    one = child(f"say({READY!r})\nwhile True:\n    time.sleep(0.1); say('{{}}')", patience_s=60.0)
    await one.start()
    end = asyncio.ensure_future(one.ended())
    await asyncio.wait_for(one.ready, 60)
    await one.end(goodbye_s=0.2)
    assert await asyncio.wait_for(end, 60) == "it ended with signal SIGKILL"
    assert one.pid is not None
    assert not psutil.pid_exists(one.pid)


async def test_whoever_stops_waiting_for_its_end_brings_it_about() -> None:
    one = child(f"say({READY!r}); sys.stdin.read()", patience_s=60.0)
    await one.start()
    end = asyncio.ensure_future(one.ended())
    await asyncio.wait_for(one.ready, 60)
    end.cancel()
    with pytest.raises(asyncio.CancelledError):
        await end
    assert one.pid is not None
    assert not psutil.pid_exists(one.pid)


async def test_a_first_start_that_fails_is_told_in_the_childs_words_and_not_tried_again() -> None:
    made: list[Child] = []

    def make() -> Child:
        made.append(child(f"say({FAILED!r}); sys.exit(1)"))
        return made[-1]

    with pytest.raises(ModelLoadError, match="no such model"):
        await asyncio.wait_for(Post("child", make, EngineConfig(model="m")).run(), 60)
    assert len(made) == 1


async def test_a_child_that_ends_is_started_again_until_that_is_too_often(log_lines: list[dict]) -> None:
    made: list[Child] = []

    def make() -> Child:
        made.append(child(f"say({READY!r}); time.sleep(0.1); os._exit(7)"))
        return made[-1]

    post = Post("child", make, EngineConfig(model="m", max_restarts=2))
    with pytest.raises(EngineDeadError, match="ended too often; the last time: it ended with status 7"):
        await asyncio.wait_for(post.run(), 30)
    assert len(made) == 3
    assert [line["restart_in_s"] for line in log_lines if line["event"] == "process.ended"] == [0.1, 0.2, None]


def test_lines_say_what_was_meant() -> None:
    for line in (ORDERS, FrontendOrders("ipc:///x", EngineConfig(model="m", api_key="secret"), 5)):
        assert decode_to_child(as_line(line)) == line
    for said in (Ready(), Failed(Problem("ConfigError", "two\nlines", "key"))):
        assert as_line(said).count(b"\n") == 1
        assert decode_to_parent(as_line(said)) == said
