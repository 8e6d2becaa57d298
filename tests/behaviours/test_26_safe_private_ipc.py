"""26. Whatever bytes come to whichever socket, nothing is executed, it is logged and dropped, and others are served on."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import stat
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

from repertory import EngineDeadError, SamplingParams, __version__, connect
from repertory.actors.links.codec import CoreFrame, FrontendFrame, decode_from_core, encode
from repertory.protocol.capacity import Capacity
from repertory.protocol.config import EngineConfig
from repertory.protocol.ids import RequestId, request_ids
from repertory.protocol.link import Beat, Dismissed, DrainAsked, Hello, StatsAnswer, StatsAsked, Welcome
from repertory.protocol.messages import Abort, Admit, Barred, Closed, Credit, Refused, Resend, TokensSampled
from repertory.tests.engine.stage import greedy, last_of, prompt_of
from repertory.tests.served.conftest import Core, OpenCore
from repertory.tests.served.raw import heard, raw, welcomed

pytestmark = pytest.mark.alone

ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, output_kind="delta")
MINE = 77


class Trap:
    """Unpickled, it would leave a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.file),))


def garbage(trap: Path, epoch: int) -> list[list[bytes]]:
    """Messages that are none."""
    draw = random.Random(1)
    beat = encode(FrontendFrame(epoch, [Beat(1)]))
    abort = msgspec.msgpack.encode([epoch, [["Abort", 5, "abort", None, "too", {"much": [1]}]]])
    return [
        [b""],
        [pickle.dumps(Trap(trap))],
        [pickle.dumps([epoch, [Trap(trap)]], protocol=0)],
        [b"", beat],
        [beat, beat],
        [beat[:-1]],
        [beat + b"\0"],
        [abort],
        [b"\xa1\xff"],
        [b"\x91" * 100_000],
        [b"\x92\x01\x91" + b"\x92\xa4Beat" + b"\xcf" + b"\xff" * 8],
        [msgspec.msgpack.encode([epoch, [["Beat"]]])],
        [msgspec.msgpack.encode([epoch, [["Beat", -1]]])],
        [msgspec.msgpack.encode([epoch, [["Beat", "one"]]])],
        [msgspec.msgpack.encode([epoch, [["Eval", "import os"]]])],
        [msgspec.msgpack.encode([epoch, [["Admit", 1]]])],
        [msgspec.msgpack.encode({"epoch": epoch, "messages": []})],
        [msgspec.msgpack.encode([epoch, [["Hello", -1, ""]]])],
        *([draw.randbytes(draw.randrange(1, 200))] for _ in range(200)),
    ]


def sockets_in(folder: Path) -> list[str]:
    return [f"ipc://{file}" for file in folder.rglob("*") if stat.S_ISSOCK(file.stat().st_mode)]


async def test_garbage_on_every_socket_harms_nobody(open_core: OpenCore, sockets: Path, tmp_path: Path) -> None:
    core: Core = await open_core(num_device_blocks=40_000, credit_window=64)
    engine = await core.connect()
    stream = engine.generate(prompt_of(9), ENDLESS)
    await anext(stream)
    endpoints = sockets_in(sockets)
    assert len(endpoints) == 2, "the core's and the device's"
    for endpoint in endpoints:
        for kind in (zmq.DEALER, zmq.REQ, zmq.PAIR):
            async with raw(endpoint, kind) as socket:
                socket.setsockopt(zmq.SNDTIMEO, 100)
                for parts in garbage(tmp_path / "trap", epoch=1):
                    try:
                        await socket.send_multipart(parts)
                    except zmq.ZMQError:
                        break  # this kind of socket takes no more, or is not let in
        _, writer = await asyncio.open_unix_connection(endpoint.removeprefix("ipc://"))
        writer.write(random.Random(2).randbytes(10_000))
        await writer.drain()
        writer.close()
    assert not (tmp_path / "trap").exists()
    await anext(stream)
    await stream.aclose()
    assert (await last_of(engine.generate(prompt_of(9), greedy()))).finished
    assert await engine.audit() == []
    assert (await engine.stats()).num_restarts == 0


async def test_garbage_from_somebody_who_was_welcomed_is_dropped_and_he_is_served_on(
    open_core: OpenCore, tmp_path: Path
) -> None:
    core: Core = await open_core()
    engine = await core.connect()
    async with raw(core.endpoint) as socket:
        epoch = await welcomed(socket)
        for parts in garbage(tmp_path / "trap", epoch):
            await socket.send_multipart(parts)
        await socket.send(encode(FrontendFrame(epoch, [StatsAsked(1)])))
        assert (await heard(socket, StatsAnswer)).number == 1
    assert not (tmp_path / "trap").exists()
    assert (await last_of(engine.generate(prompt_of(9), greedy()))).finished


def absurd_admits() -> list[Admit]:
    """Requests that no tokenizer of ours would make."""
    new_id = request_ids(MINE)
    seeded = SamplingParams(temperature=0.0, max_tokens=3, seed=1)

    def admit(**fields: Any) -> Admit:
        defaults = {"token_ids": [5, 6, 7], "params": seeded, "arrival_s": 0.0, "label": "x"}
        return Admit(request_id=new_id(), **{**defaults, **fields})

    return [
        admit(token_ids=[]),
        admit(token_ids=[5, -1]),
        admit(token_ids=[5, 2**40]),
        admit(token_ids=[5] * 5000),
        admit(params=SamplingParams(max_tokens=3)),
        admit(params=SamplingParams(n=10**6, seed=1)),
        admit(params=SamplingParams(n=-1, seed=1)),
        admit(params=SamplingParams(temperature=float("nan"), seed=1)),
        admit(params=SamplingParams(max_tokens=-5, seed=1)),
        admit(params=SamplingParams(logprobs=10**9, seed=1)),
        admit(params=SamplingParams(logprobs=10**9, seed=1), holds=True),
        admit(params=SamplingParams(logit_bias={10**9: 1.0}, seed=1)),
        admit(stop_token_ids=[-1]),
        admit(barred=Barred([2**40], [[-3]])),
        admit(arrival_s=float("nan")),
        admit(arrival_s=float("-inf")),
        admit(priority=2**62),
        admit(label="x" * 100_000),
        admit(trace_context={"x" * 100_000: ""}),
        admit(follows=RequestId(5 << 32 | 1)),
    ]


async def test_absurd_requests_are_refused_and_the_core_goes_on(open_core: OpenCore) -> None:
    core: Core = await open_core()
    engine = await core.connect()
    async with raw(core.endpoint) as socket:
        epoch = await welcomed(socket)
        for admit in absurd_admits():
            await socket.send(encode(FrontendFrame(epoch, [admit])))
            refused = await heard(socket, Refused)
            assert refused.request_id == admit.request_id
            assert refused.problem is not None
        good = Admit(
            request_id=request_ids(MINE)(),
            label="x",
            token_ids=[5, 6, 7],
            params=SamplingParams(temperature=0.0, max_tokens=3, seed=1),
            arrival_s=-(10.0**9),
        )
        odd = [
            Credit(good.request_id, -5),
            Credit(good.request_id, 5, -1),
            Abort(good.request_id, "x", -1),
            Abort(good.request_id, "x", 10**9),
        ]
        await socket.send(encode(FrontendFrame(epoch, [good, *odd, Resend(RequestId(MINE << 32 | 999)), Closed([])])))
        assert (await heard(socket, TokensSampled)).token_ids
    assert (await last_of(engine.generate(prompt_of(9), greedy()))).finished
    assert await engine.audit() == []


async def test_a_frontend_cannot_speak_for_anothers_requests(open_core: OpenCore) -> None:
    core: Core = await open_core(num_device_blocks=40_000, credit_window=64)
    engine = await core.connect()
    stream = engine.generate(prompt_of(9), ENDLESS)
    await anext(stream)
    async with raw(core.endpoint) as socket:
        epoch = await welcomed(socket)
        for message in (Abort(stream.id), Closed([stream.id]), Credit(stream.id, 10**6), Resend(stream.id)):
            await socket.send(encode(FrontendFrame(epoch, [message])))
        await socket.send(encode(FrontendFrame(epoch, [StatsAsked(1)])))
        assert decode_from_core(await socket.recv_multipart())
    for _ in range(20):
        assert not (await anext(stream)).finished
    await stream.aclose()
    assert await engine.audit() == []


async def test_strangers_and_doubles_are_dismissed(open_core: OpenCore) -> None:
    core: Core = await open_core()
    async with raw(core.endpoint) as first, raw(core.endpoint) as second:
        await welcomed(first)
        for message, why in (
            (StatsAsked(1), "no place"),
            (Hello(MINE, __version__), "has its incarnation"),
            (Hello(MINE + 1, "0.0.0"), "version"),
        ):
            await second.send(encode(FrontendFrame(0, [message])))
            assert why in (await heard(second, Dismissed)).reason
        await second.send(encode(FrontendFrame(0, [])))
        assert "no place" in (await heard(second, Dismissed)).reason


async def test_what_was_meant_for_another_epoch_is_dropped(open_core: OpenCore) -> None:
    core: Core = await open_core()
    async with raw(core.endpoint) as socket:
        epoch = await welcomed(socket)
        await socket.send(encode(FrontendFrame(epoch - 1, [StatsAsked(1), DrainAsked(2, 0.0)])))
        await socket.send(encode(FrontendFrame(epoch, [StatsAsked(3)])))
        answer = await heard(socket, StatsAnswer)
        assert answer.number == 3
    engine = await core.connect()
    assert (await last_of(engine.generate(prompt_of(9), greedy()))).finished


async def test_a_frontend_drops_what_is_no_message_and_leaves_a_core_that_was_replaced(
    sockets: Path, paper_model: Path, log_lines: list[dict], tmp_path: Path
) -> None:
    context = zmq.asyncio.Context()
    endpoint = f"ipc://{sockets}/core"
    config = EngineConfig(model=str(paper_model), device="simulated")
    capacity = Capacity("fake", 9, 0, 4, 1, 320, 64)
    with context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        engine = connect(endpoint)
        starting = asyncio.ensure_future(engine.start())
        address, _ = await socket.recv_multipart()
        for parts in garbage(tmp_path / "trap", 5):
            await socket.send_multipart([address, *parts])
        await socket.send_multipart([address, encode(CoreFrame(5, [Welcome(config, capacity, str(paper_model))]))])
        await starting
        for parts in garbage(tmp_path / "trap", 5):
            await socket.send_multipart([address, *parts])
        stream = engine.generate("hello", greedy())
        while "Admit" not in str(parts := await socket.recv_multipart()):
            pass
        await engine.check_health()
        await socket.send_multipart([address, encode(CoreFrame(6, [Beat(0), Dismissed("another core")]))])
        with pytest.raises(EngineDeadError, match="another core"):
            await anext(stream)
        await engine.aclose()
    context.term()
    assert not (tmp_path / "trap").exists()
    assert any(line["event"] == "link.bad_message" for line in log_lines)


async def test_sockets_are_private_and_nothing_listens_on_tcp(open_core: OpenCore, sockets: Path) -> None:
    core: Core = await open_core()
    folders = [Path(endpoint.removeprefix("ipc://")).parent for endpoint in sockets_in(sockets)]
    assert len(folders) == 2
    for folder in folders:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(folder.name) >= len("repertory-") + 8
    for pid in (core.pid, core.device_pid):
        assert psutil.Process(pid).net_connections("inet") == []
