"""Random bytes and mutated messages on the core's socket, from a welcomed frontend and from strangers: others are unharmed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from repertory import SamplingParams, __version__
from repertory.actors.links.codec import FrontendFrame, ToCore, encode
from repertory.protocol.ids import RequestId
from repertory.protocol.link import AuditAsked, Beat, Goodbye, Hello, ResetAsked, StatsAsked
from repertory.protocol.messages import Abort, Admit, Barred, Closed, Credit, Resend
from repertory.protocol.structured import StructuredOutputs
from repertory.tests.supervision.crowd import alone, begin, crowd, results

from .conftest import SIMULATED, Core, stats_until
from .raw import raw, welcomed

OpenCore = Callable[..., Any]
NUM_FRAMES = 20_000
ODD_VALUES = [
    -1,
    0,
    1,
    2**31,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    1.5,
    float("nan"),
    float("inf"),
    None,
    True,
    "",
    "x" * 300,
    b"x",
    [],
    {},
    [[]],
]

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(600)]


def valid_messages(draw: random.Random, incarnation: int, epoch: int) -> list[ToCore]:
    """Messages that a frontend may say, for requests of its own."""
    request = RequestId(incarnation << 32 | draw.randrange(1, 50))
    params = SamplingParams(
        n=draw.choice([1, 1, 3]),
        temperature=draw.choice([0.0, 1.0]),
        seed=1,
        max_tokens=draw.choice([1, 5, None]),
        logprobs=draw.choice([None, 2]),
        stop=["a"],
        logit_bias={5: 1.0},
        structured_outputs=draw.choice([None, None, StructuredOutputs(choice=["yes"])]),
    )
    admit = Admit(
        request, "x", [5, 6, 7], params, 1.0, [2], 0, "t", "s", {"a": "b"}, draw.random() < 0.1, None, Barred([2], [[5, 6]])
    )
    others = [Abort(request), Credit(request, 5), Resend(request), Closed([request]), Beat(5), StatsAsked(1), AuditAsked(2)]
    return [draw.choice([admit, admit, *others, ResetAsked(3), Hello(incarnation, __version__)])]


def mutated(draw: random.Random, frame: bytes) -> bytes:
    """A frame with some bytes, or some values, changed."""
    if draw.random() < 0.5:
        data = bytearray(frame)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        return bytes(data[: draw.choice([len(data), draw.randrange(len(data) + 1)])])
    tree = msgspec.msgpack.decode(frame)
    for _ in range(draw.randint(1, 3)):
        _change(draw, tree)
    return msgspec.msgpack.encode(tree)


def _change(draw: random.Random, tree: Any) -> None:
    """Put an odd value somewhere, or take one away."""
    while True:
        keys = list(range(len(tree))) if isinstance(tree, list) else list(tree)
        if not keys:
            return
        key = draw.choice(keys)
        if isinstance(tree[key], list | dict) and draw.random() < 0.8:
            tree = tree[key]
            continue
        if draw.random() < 0.2:
            del tree[key]
        else:
            tree[key] = draw.choice(ODD_VALUES)
        return


async def _swallow(socket: zmq.asyncio.Socket) -> None:
    """Read whatever comes: who reads nothing is given up."""
    while True:
        await socket.recv_multipart()


@pytest.mark.parametrize("seed", range(3))
async def test_mutated_messages_harm_nobody_else(open_core: OpenCore, paper_model: Path, seed: int) -> None:
    draw = random.Random(seed)
    requests = crowd(100, seed=seed)
    expected = await alone(paper_model, requests, **SIMULATED)
    core: Core = await open_core(max_num_seqs=8, log_level="error", heartbeat_timeout_s=30.0)
    pid = core.pid
    engine = await core.connect()
    found: list[Any] = []
    for round_number in range(10):
        tasks = begin(engine, requests[round_number * 10 : round_number * 10 + 10])
        incarnation = 1000 + round_number
        async with raw(core.endpoint) as socket, raw(core.endpoint) as stranger:
            epoch = await welcomed(socket, incarnation)
            reading = asyncio.ensure_future(_swallow(socket))
            for number in range(NUM_FRAMES // 10):
                frame = encode(FrontendFrame(epoch, valid_messages(draw, incarnation, epoch)))
                await socket.send(frame if number % 10 == 0 else mutated(draw, frame))
                await stranger.send(draw.randbytes(draw.randrange(100)) if number % 2 else mutated(draw, frame))
                if number % 50 == 0:
                    await asyncio.sleep(0.001)
            await socket.send(encode(FrontendFrame(epoch, [Goodbye()])))
            found += await results(tasks)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
    assert found == expected
    assert core.pid == pid
    assert not core.ends[0].done()
    await stats_until(engine, lambda stats: not (stats.num_running or stats.num_waiting or stats.num_paused))
    assert await engine.audit() == []
    assert (await engine.stats()).num_restarts == 0, "no message took the device down"
