"""A frontend's end of its link: one connection to one life of the core.

| what happens | what follows |
| --- | --- |
| no core listens yet | `greet` waits: ZeroMQ connects once there is one |
| the core's process ends | the connection breaks: lost at once, after what has come has been heard |
| it is silent for `heartbeat_timeout_s` | lost; silence is judged only once all that has come is heard |
| it dismisses us | lost, with its reason |
| a frame that is no frame | it is logged and dropped |
| a frame of another epoch | dropped, unless it dismisses us: another core has taken the endpoint |

A link that is lost is closed, and another one made: nothing that was meant for one core reaches the next.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

import anyio
import anyio.lowlevel
import zmq
import zmq.asyncio

from ...protocol.errors import EngineDeadError, ValidationError, problem_of
from ...protocol.link import Answer, Beat, Dismissed, Goodbye, Hello, NotAnswered, Question, Welcome
from ...protocol.messages import Admit, Refused, TokensSampled
from ...protocol.metrics import ActorLoad
from ..mailbox import Mailbox
from ..observing.logs import logger
from ..scheduler import FromFrontend, SchedulerInbox
from .codec import VERSION, BadFrame, FrontendFrame, ToCore, ToFrontend, decode_from_core, encode
from .wire import LOOK_S, MAX_UNREAD_BYTES, Account, Wire, heartbeat_period_s

ANSWER_S = 10.0
"""How long a question may take beyond what it asks for itself."""


class LookError(RuntimeError):
    """The core serves, and cannot say what it was asked."""


Samples = Mailbox[TokensSampled | Refused]


class FrontendLink:
    """`greet`, then `run` until it returns why the link is lost, then `close`. Used once."""

    def __init__(self, endpoint: str, incarnation: int) -> None:
        self.endpoint = endpoint
        self.incarnation = incarnation
        self._epoch = 0
        self._account = Account()
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count(1)
        self._samples: Samples | None = None
        self._heard_at = time.monotonic()
        self.actor_loads: Callable[[], list[ActorLoad]] = list
        """How the actors on this side are, for the core to know."""
        self._log = logger("link")
        self._context = zmq.asyncio.Context()
        self._wire = Wire(self._context, zmq.DEALER)
        self._monitor = self._wire.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._listening: asyncio.Task[None] | None = None

    # ---- life -----------------------------------------------------------------------------------

    async def greet(self) -> Welcome:
        """Connect, and wait for the core's welcome; however long that takes. Raises `EngineDeadError` when it refuses."""
        self._wire.socket.connect(self.endpoint)
        self._say(Hello(self.incarnation, VERSION))
        self._listening = asyncio.create_task(self._wire.listen(self._on_frame))
        self._listening.add_done_callback(self._deaf)
        waits: list[asyncio.Future[str] | asyncio.Future[Welcome]] = [self._welcome, self._lost]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not self._welcome.done():
            raise EngineDeadError(self._lost.result())
        await self._forget_earlier_ends()
        return self._welcome.result()

    async def _forget_earlier_ends(self) -> None:
        """A core that was there before the one that answered: its end was noticed on the way, and is none of this link's."""
        while await self._monitor.poll(0):
            await self._monitor.recv_multipart()

    @property
    def is_welcome(self) -> bool:
        """Whether the core has answered `greet`."""
        return self._welcome.done()

    async def run(self, outbox: Mailbox[SchedulerInbox], samples: Samples) -> str:
        """Bring the core what is in `outbox` and what it says to `samples`, until the link is lost: returns why."""
        self._samples = samples
        async with anyio.create_task_group() as duties:
            duties.start_soon(self._send_all, outbox, samples)
            for duty in (self._beat, self._judge, self._watch):
                duties.start_soon(duty)
            reason = await self._lost
            duties.cancel_scope.cancel()
        return reason

    async def aclose(self) -> None:
        """Take leave where somebody is there to hear it, and close the socket. What is still asked for fails."""
        self._lose("the link has been closed")
        try:
            if self._listening is not None:
                self._listening.cancel()
                await asyncio.wait([self._listening])
        finally:  # whoever waits here may be cancelled, by a program that knows no shields
            self._shut()

    def _shut(self) -> None:
        if self._welcome.done():
            self._say(Goodbye())
        self._wire.socket.disable_monitor()
        self._monitor.close(linger=0)
        self._wire.close(linger_ms=100)
        self._context.term()

    async def ask(self, question: Callable[[int], Question], *, timeout_s: float | None = ANSWER_S) -> Answer:
        """Ask the core and wait for its answer.

        Raises `EngineDeadError` when the link is lost or the time is up, `LookError` when the core cannot say.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._say(question(number))
            waits: list[asyncio.Future[str] | asyncio.Future[Answer]] = [answer, self._lost]
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._answers[number]
        if answer.done():
            found = answer.result()
            if isinstance(found, NotAnswered):
                raise LookError(f"the core failed to look at itself: {found.reason}")
            return found
        raise EngineDeadError(self._lost.result() if self._lost.done() else f"the core did not answer for {timeout_s:g} s")

    def check(self) -> None:
        """Raise `EngineDeadError` unless the core's loop has been heard of lately."""
        if self._lost.done():
            raise EngineDeadError(self._lost.result())
        if self._silence_s() > self._patience_s:
            raise EngineDeadError(f"the core has been silent for {self._silence_s():.1f} s")

    # ---- from the core --------------------------------------------------------------------------

    async def _on_frame(self, parts: list[bytes]) -> None:
        num_bytes = sum(map(len, parts))
        try:
            frame = decode_from_core(parts)
        except BadFrame as error:
            self._log.warning("link.bad_message", reason=str(error), num_bytes=num_bytes)
            return
        for message in frame.messages:
            if isinstance(message, Dismissed):
                self._lose(message.reason)
            elif isinstance(message, Welcome) and not self._epoch:
                self._epoch = frame.epoch
                self._welcome.set_result(message)
            elif frame.epoch == self._epoch:
                self._heard_at = time.monotonic()
                await self._on_message(message)
        self._account.taken(num_bytes)
        if self._account.is_report_due:
            self._report()

    async def _on_message(self, message: ToFrontend) -> None:
        if isinstance(message, TokensSampled | Refused):
            if self._samples is not None:
                await self._samples.post(message)
        elif isinstance(message, Beat):
            self._account.read_there(message.num_taken_bytes)
        elif isinstance(message, Welcome | Dismissed):
            return
        elif (answer := self._answers.get(message.number)) is not None and not answer.done():
            answer.set_result(message)

    # ---- to the core ----------------------------------------------------------------------------

    def _say(self, *messages: ToCore) -> None:
        frame = encode(FrontendFrame(self._epoch, list(messages)))
        self._account.sent(len(frame))
        self._wire.send([frame])

    async def _send_all(self, outbox: Mailbox[SchedulerInbox], samples: Samples) -> None:
        while True:
            small: list[ToCore] = []
            for message in await outbox.take():
                assert isinstance(message, FromFrontend)
                if not isinstance(message, Admit):
                    small.append(message)
                    continue
                # By itself: prompts are long, and a frame has a limit.
                self._say_small(small)
                await self._admit(message, samples)
            self._say_small(small)
            while self._account.num_unread > MAX_UNREAD_BYTES:  # noqa: ASYNC110 - it is reported to somebody else
                # The core is behind: what comes now waits in the outbox, and whoever fills that is told so.
                await anyio.sleep(LOOK_S)

    def _say_small(self, messages: list[ToCore]) -> None:
        if messages:
            self._say(*messages)
            messages.clear()

    async def _admit(self, message: Admit, samples: Samples) -> None:
        try:
            self._say(message)
        except (UnicodeEncodeError, OverflowError, TypeError) as error:
            # Half a surrogate pair in a label, say: this request cannot travel, and others can.
            wrong = ValidationError(f"the request cannot be sent to the core: {error}")
            await samples.post(Refused(message.request_id, problem_of(wrong)))

    def _report(self) -> None:
        self._account.reported()
        self._say(Beat(self._account.num_taken, self.actor_loads()))

    # ---- whether the core is there --------------------------------------------------------------

    async def _beat(self) -> None:
        period_s = heartbeat_period_s(self._welcome.result().config)
        while True:
            self._report()
            await anyio.sleep(period_s)

    async def _judge(self) -> None:
        while True:
            await anyio.sleep(LOOK_S)
            if (silence_s := self._silence_s()) > self._patience_s:
                self._lose(f"the core has been silent for {silence_s:.1f} s")

    async def _watch(self) -> None:
        await self._monitor.recv_multipart()
        while self._wire.has_unread and not self._lost.done():
            await anyio.lowlevel.checkpoint()  # what it said before it ended is still to be heard
        self._lose("the core's process has ended")

    @property
    def _patience_s(self) -> float:
        return self._welcome.result().config.heartbeat_timeout_s

    def _silence_s(self) -> float:
        return self._wire.heard_until() - self._heard_at

    def _deaf(self, listening: asyncio.Task[None]) -> None:
        """A link that nobody listens to is as good as lost."""
        error = None if listening.cancelled() else listening.exception()
        if error is not None:
            self._lose(f"the link to the core failed: {error!r}")

    def _lose(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)
