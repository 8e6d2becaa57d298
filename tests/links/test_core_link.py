"""The core's end of the link with hand-made frontends: who reads nothing is given up, and nobody waits for him."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
import zmq.asyncio

from repertory import SamplingParams, __version__
from repertory.actors.links.codec import FrontendFrame, ToFrontend, decode_from_core, encode
from repertory.actors.links.core_link import CoreLink
from repertory.actors.links.wire import REPORT_BYTES
from repertory.actors.mailbox import Mailbox
from repertory.protocol.capacity import Capacity
from repertory.protocol.config import EngineConfig
from repertory.protocol.ids import RequestId
from repertory.protocol.link import Beat, Dismissed, Goodbye, Hello, Welcome, without_secrets
from repertory.protocol.messages import Abort, Admit, Closed, FrontendLost, TokensSampled

MAX_UNREAD = 20_000
PATIENCE_S = 60.0
CAPACITY = Capacity("none", 1000, 0, 4, 1, 320, 4096)
CONFIG = EngineConfig(model="none", heartbeat_timeout_s=1.0)


class Raw:
    """A frontend made of a socket."""

    def __init__(self, socket: zmq.asyncio.Socket, incarnation: int) -> None:
        self.socket = socket
        self.incarnation = incarnation
        self.epoch = 0
        self.num_read = 0

    def id_of(self, number: int) -> RequestId:
        return RequestId(self.incarnation << 32 | number)

    async def say(self, *messages: Any) -> None:
        await self.socket.send(encode(FrontendFrame(self.epoch, list(messages))))

    async def hear(self, kind: type[ToFrontend]) -> Any:
        """The next message of that kind."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                parts = await self.socket.recv_multipart()
                frame = decode_from_core(parts)
                self.epoch = frame.epoch
                self.num_read += len(parts[0])
                for message in frame.messages:
                    if isinstance(message, kind):
                        return message

    async def greet(self) -> None:
        await self.say(Hello(self.incarnation, __version__))
        await self.hear(Welcome)
        await self.say(Beat(0))

    def sampled(self, number: int, count: int = 1) -> TokensSampled:
        return TokensSampled([self.id_of(number)] * count, [number] * count, 1.0)


class Core:
    """A link whose scheduler is a mailbox."""

    def __init__(self, link: CoreLink, inbox: Mailbox[Any], endpoint: str) -> None:
        self.link = link
        self.inbox = inbox
        self.endpoint = endpoint
        self.taken: list[Any] = []

    async def next(self) -> Any:
        """What the scheduler gets next."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.taken:
                self.taken += await self.inbox.take(timeout_s=PATIENCE_S)
        return self.taken.pop(0)


Connect = Callable[[int], Awaitable[Raw]]


@pytest.fixture
async def core(log_lines: list[dict]) -> AsyncIterator[Core]:
    with tempfile.TemporaryDirectory(prefix="ln-") as folder:
        inbox: Mailbox[Any] = Mailbox("scheduler", 8)
        link = CoreLink(f"ipc://{folder}/core", inbox, max_unread_bytes=MAX_UNREAD)
        link.bind()
        half: Any = SimpleNamespace(scheduler=SimpleNamespace(core=SimpleNamespace(config=CONFIG, capacity=CAPACITY)))
        running = asyncio.ensure_future(link.run(half, Welcome(without_secrets(CONFIG), CAPACITY, "none")))
        yield Core(link, inbox, f"ipc://{folder}/core")
        running.cancel()
        await asyncio.wait([running])
        link.close("the test is over")
        inbox.close()


@pytest.fixture
async def connect(core: Core) -> AsyncIterator[Connect]:
    context = zmq.asyncio.Context()
    async with AsyncExitStack() as stack:
        stack.callback(context.term)

        async def one(incarnation: int) -> Raw:
            socket = stack.enter_context(context.socket(zmq.DEALER))
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(core.endpoint)
            raw = Raw(socket, incarnation)
            await raw.greet()
            return raw

        yield one


async def test_each_frontend_hears_of_its_own_requests_only(core: Core, connect: Connect) -> None:
    first, second = await connect(1), await connect(2)
    both = TokensSampled([first.id_of(1), second.id_of(1)], [11, 22], 1.0)
    await core.link.post(both)
    assert (await first.hear(TokensSampled)).token_ids == [11]
    assert (await second.hear(TokensSampled)).token_ids == [22]


async def test_who_reads_nothing_is_given_up_at_the_limit_and_others_get_all_of_theirs(
    core: Core, connect: Connect, log_lines: list[dict]
) -> None:
    lazy, busy = await connect(1), await connect(2)
    reading = asyncio.ensure_future(_read(busy, 400))
    beating = asyncio.ensure_future(_beat(lazy))  # alive, but it takes nothing in
    for number in range(400):
        await core.link.post(TokensSampled([lazy.id_of(1)] * 20 + [busy.id_of(1)], [5] * 20 + [number], 1.0))
        await asyncio.sleep(0)
    assert await reading == list(range(400))
    assert await core.next() == FrontendLost(1)
    assert len(core.link) == 1
    beating.cancel()
    (lost,) = [line for line in log_lines if line["event"] == "frontend.lost"]
    assert "unread" in lost["reason"]
    queued = 0
    while await lazy.socket.poll(100):
        queued += sum(map(len, await lazy.socket.recv_multipart()))
    assert queued < 2 * MAX_UNREAD, "what is kept for it is bounded"


async def test_what_is_reported_as_read_is_not_unread(core: Core, connect: Connect) -> None:
    raw = await connect(1)
    for number in range(100):
        await core.link.post(raw.sampled(number, 60))
        await raw.hear(TokensSampled)
        await raw.say(Beat(raw.num_read))
        await asyncio.sleep(0.001)
    assert raw.num_read > 2 * MAX_UNREAD
    assert len(core.link) == 1


async def test_a_claim_to_have_read_more_than_was_sent_buys_nothing(core: Core, connect: Connect) -> None:
    raw = await connect(1)
    await raw.say(Beat(2**60))
    await raw.hear(Beat)
    for number in range(MAX_UNREAD // 50):
        await core.link.post(raw.sampled(number, 60))
    assert await core.next() == FrontendLost(1)


async def test_silence_is_a_loss_and_garbage_is_no_life_sign(core: Core, connect: Connect) -> None:
    raw = await connect(1)
    async with asyncio.timeout(PATIENCE_S):
        while len(core.link):
            await raw.socket.send(b"I am here")
            await asyncio.sleep(0.02)
    assert "silent" in (await raw.hear(Dismissed)).reason


async def test_a_loss_comes_after_all_that_the_lost_one_has_said(core: Core, connect: Connect) -> None:
    raw = await connect(1)
    params = SamplingParams(seed=1)
    admits = [Admit(raw.id_of(number), "x", [5], params, 0.0) for number in range(1, 41)]  # more than the inbox holds
    await raw.say(*admits, Goodbye(), Abort(raw.id_of(1)))
    got = [await core.next() for _ in range(41)]
    assert got == [*admits, FrontendLost(1)]
    await asyncio.sleep(0.05)
    assert not core.taken
    assert not len(core.inbox), "what it said after its goodbye is not heard"


async def test_a_full_scheduler_delays_and_loses_nothing(core: Core, connect: Connect) -> None:
    first, second = await connect(1), await connect(2)
    for number in range(1, 31):
        await first.say(Abort(first.id_of(number)))
        await second.say(Abort(second.id_of(number)))
    await asyncio.sleep(0.1)
    got = [await core.next() for _ in range(60)]
    for raw in (first, second):
        mine = [message for message in got if message.request_id >> 32 == raw.incarnation]
        assert mine == [Abort(raw.id_of(number)) for number in range(1, 31)]


async def test_much_that_was_read_is_reported_before_the_next_heartbeat(core: Core, connect: Connect) -> None:
    raw = await connect(1)
    await raw.hear(Beat)
    long = Closed([raw.id_of(1)] * (REPORT_BYTES // 9 + 1))
    await raw.say(long)
    assert await core.next() == long
    assert (await raw.hear(Beat)).num_taken_bytes > REPORT_BYTES


async def _read(raw: Raw, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        found += (await raw.hear(TokensSampled)).token_ids
        await raw.say(Beat(raw.num_read))
    return found


async def _beat(raw: Raw) -> None:
    while True:
        await raw.say(Beat(0))
        await asyncio.sleep(0.05)
