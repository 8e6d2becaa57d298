"""The core's end of its link: one socket for all frontends, and an account of each.

| what happens | what follows |
| --- | --- |
| `Hello` | the frontend has a place here: `Welcome`; a version or an incarnation that cannot be: `Dismissed` |
| a frame that is no frame, or says what its sender may not | it is logged and dropped, and the sender served on |
| a frame for another epoch, or from nobody known | dropped; the sender is told that it has no place here |
| a frontend's process ends | its next message finds no receiver (within a heartbeat): its requests end |
| it is silent for `heartbeat_timeout_s` | the same; silence is judged only once all that has come is heard |
| it reads nothing | its unread bytes reach `MAX_UNREAD_BYTES`: the same |

Nobody waits for a frontend: what is said to one is queued for it alone, up to that limit.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque

import anyio
import msgspec
import zmq
import zmq.asyncio
from anyio.abc import TaskGroup

from ...protocol.errors import RequestError, problem_of, shorten
from ...protocol.ids import incarnation_of
from ...protocol.link import Beat, Dismissed, Goodbye, Hello, Question, Welcome
from ...protocol.messages import Admit, FrontendLost, Refused, TokensSampled
from ...protocol.metrics import ActorLoad
from ..core_half import CoreHalf
from ..mailbox import Mailbox
from ..observing.logs import logger
from ..scheduler import FromFrontend, SchedulerInbox
from .admitting import check_message
from .codec import VERSION, BadFrame, CoreFrame, FrontendFrame, ToCore, ToFrontend, decode_from_frontend, encode
from .controls import answer
from .splitting import split
from .wire import LOOK_S, MAX_UNREAD_BYTES, Account, Wire, heartbeat_period_s

RETRY_S = 0.001
OPENING_SILENCE_S = 60.0
"""While a frontend imports libraries and reads its tokenizer, it may be silent for this long."""
MAX_QUESTIONS = 64
"""Unanswered questions of one frontend."""


class Frontend:
    """What the core knows of one: its address on the socket, its name in ids, when it was heard, what it has not read."""

    def __init__(self, address: bytes, incarnation: int) -> None:
        self.address = address
        self.incarnation = incarnation
        self.heard_at = time.monotonic()
        self.is_ready = False
        """Whether it has begun to send life signs: it reads its tokenizer first."""
        self.account = Account()
        self.num_questions = 0
        self.actors: list[ActorLoad] = []

    @property
    def name(self) -> str:
        """As logs have it: the first half of its requests' ids."""
        return f"{self.incarnation:08x}"


class CoreLink:
    """Takes the scheduler's tokens (`Listener`) and brings it what frontends send. `run` serves until cancelled."""

    def __init__(self, endpoint: str, inbox: Mailbox[SchedulerInbox], *, max_unread_bytes: int = MAX_UNREAD_BYTES) -> None:
        self.epoch = secrets.randbits(31) + 1
        self._endpoint = endpoint
        self._inbox = inbox
        self._max_unread_bytes = max_unread_bytes
        self._undelivered: deque[SchedulerInbox] = deque()
        self._frontends: dict[bytes, Frontend] = {}
        self._by_incarnation: dict[int, Frontend] = {}
        self._log = logger("link")
        self._context = zmq.asyncio.Context()
        self._wire = Wire(self._context, zmq.ROUTER)
        self._wire.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a frontend that is gone is an error, not a silence

    def __len__(self) -> int:
        return len(self._frontends)

    def bind(self) -> None:
        """Take the endpoint. Whoever connects from here on is answered once `run` does."""
        self._wire.socket.bind(self._endpoint)

    async def run(self, half: CoreHalf, welcome: Welcome) -> None:
        """Serve until cancelled."""
        self._half, self._welcome = half, welcome
        half.elsewhere = self._actor_loads
        async with anyio.create_task_group() as duties:
            self._duties: TaskGroup = duties
            duties.start_soon(self._wire.listen, self._on_frame)
            duties.start_soon(self._beat)
            duties.start_soon(self._judge)

    def _actor_loads(self) -> list[ActorLoad]:
        """As the frontends told them last."""
        return [
            msgspec.structs.replace(load, process=f"frontend-{frontend.name}")
            for frontend in self._frontends.values()
            for load in frontend.actors
        ]

    def close(self, reason: str) -> None:
        """Tell everybody that the core ends, and close the socket. Blocks for a moment while that leaves."""
        for frontend in list(self._frontends.values()):
            self._say(frontend, Dismissed(reason))
        self._frontends.clear()
        self._by_incarnation.clear()
        self._undelivered.clear()
        self._wire.close(linger_ms=200)
        self._context.term()

    # ---- from the core --------------------------------------------------------------------------

    async def post(self, message: TokensSampled | Refused) -> None:
        """Tell each frontend what is for it. Never waits; what is for one that is gone goes nowhere."""
        if isinstance(message, Refused):
            parts: dict[int, TokensSampled | Refused] = {incarnation_of(message.request_id): message}
        else:
            parts = dict(split(message))
        for incarnation, part in parts.items():
            frontend = self._by_incarnation.get(incarnation)
            if frontend is not None:
                self._say(frontend, part)

    def _say(self, frontend: Frontend, message: ToFrontend) -> None:
        frame = encode(CoreFrame(self.epoch, [message]))
        frontend.account.sent(len(frame))
        if not self._wire.send([frontend.address, frame]):
            self._lose(frontend, "its process has ended")
        elif frontend.account.num_unread > self._max_unread_bytes:
            self._lose(frontend, f"it has left {frontend.account.num_unread} bytes unread")

    # ---- from frontends -------------------------------------------------------------------------

    async def _on_frame(self, parts: list[bytes]) -> None:
        address, *rest = parts
        try:
            frame = decode_from_frontend(rest)
        except BadFrame as error:
            self._log.warning("link.bad_message", reason=str(error), num_bytes=sum(map(len, rest)))
            return
        frontend = self._frontends.get(address)
        if frontend is None:
            self._on_stranger(address, frame)
            return
        if frame.epoch != self.epoch:
            return
        frontend.heard_at = time.monotonic()
        frontend.account.taken(sum(map(len, rest)))
        for message in frame.messages:
            if self._frontends.get(address) is frontend:
                self._on_message(frontend, message)
        if frontend.account.is_report_due:
            self._report(frontend)
        while self._undelivered:  # noqa: ASYNC110 - room in an inbox is nobody's event
            # The scheduler's inbox is full, and is emptied in its next turn: nothing more is read until then.
            await asyncio.sleep(RETRY_S)

    def _on_stranger(self, address: bytes, frame: FrontendFrame) -> None:
        hello = frame.messages[0] if frame.messages else None
        if not isinstance(hello, Hello):
            reason = "it has no place here"
        elif hello.version != VERSION:
            reason = f"it is version {shorten(hello.version)}, the core {VERSION}"
        elif hello.incarnation in self._by_incarnation:
            reason = "another frontend has its incarnation"
        else:
            frontend = Frontend(address, hello.incarnation)
            self._frontends[address] = self._by_incarnation[hello.incarnation] = frontend
            self._log.info("frontend.joined", frontend=frontend.name)
            self._say(frontend, self._welcome)
            return
        self._wire.send([address, encode(CoreFrame(self.epoch, [Dismissed(reason)]))])

    def _on_message(self, frontend: Frontend, message: ToCore) -> None:
        if isinstance(message, Beat):
            frontend.is_ready = True
            frontend.actors = message.actors
            frontend.account.read_there(message.num_taken_bytes)
        elif isinstance(message, Goodbye):
            self._log.info("frontend.left", frontend=frontend.name)
            self._forget(frontend)
        elif isinstance(message, Question):
            self._on_question(frontend, message)
        elif isinstance(message, Hello):
            self._drop(frontend, "it has said hello already")
        else:
            self._on_request(frontend, message)

    def _on_request(self, frontend: Frontend, message: FromFrontend) -> None:
        try:
            check_message(message, frontend.incarnation, self._half.scheduler.core.capacity)
        except RequestError as error:
            self._drop(frontend, f"{type(message).__name__}: {error}")
            if isinstance(message, Admit):
                self._say(frontend, Refused(message.request_id, problem_of(error)))
        else:
            self._deliver(message)

    def _drop(self, frontend: Frontend, reason: str) -> None:
        self._log.warning("link.bad_message", reason=reason, frontend=frontend.name)

    def _on_question(self, frontend: Frontend, question: Question) -> None:
        if frontend.num_questions >= MAX_QUESTIONS:
            self._drop(frontend, f"it has {MAX_QUESTIONS} questions open")
        else:
            frontend.num_questions += 1
            self._duties.start_soon(self._answer, frontend, question)

    async def _answer(self, frontend: Frontend, question: Question) -> None:
        found = await answer(question, self._half)
        frontend.num_questions -= 1
        if self._frontends.get(frontend.address) is frontend:
            self._say(frontend, found)

    # ---- who is here ----------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            for frontend in list(self._frontends.values()):
                self._report(frontend)
            await anyio.sleep(heartbeat_period_s(self._half.scheduler.core.config))

    def _report(self, frontend: Frontend) -> None:
        frontend.account.reported()
        self._say(frontend, Beat(frontend.account.num_taken))

    async def _judge(self) -> None:
        patience_s = self._half.scheduler.core.config.heartbeat_timeout_s
        while True:
            await anyio.sleep(LOOK_S)
            heard_until = self._wire.heard_until()
            for frontend in list(self._frontends.values()):
                silence_s = heard_until - frontend.heard_at
                if silence_s > (patience_s if frontend.is_ready else max(patience_s, OPENING_SILENCE_S)):
                    self._lose(frontend, f"it has been silent for {silence_s:.1f} s")

    def _lose(self, frontend: Frontend, reason: str) -> None:
        if self._frontends.get(frontend.address) is not frontend:
            return
        self._forget(frontend)
        self._log.warning("frontend.lost", frontend=frontend.name, reason=reason)
        # Should it come to itself again, it is to know where it stands.
        self._wire.send([frontend.address, encode(CoreFrame(self.epoch, [Dismissed(f"the core gave it up: {reason}")]))])

    def _forget(self, frontend: Frontend) -> None:
        del self._frontends[frontend.address]
        del self._by_incarnation[frontend.incarnation]
        self._deliver(FrontendLost(frontend.incarnation))

    # ---- to the scheduler -----------------------------------------------------------------------

    def _deliver(self, message: SchedulerInbox) -> None:
        """In order, whatever has room: a loss comes after all that the lost one has said."""
        self._undelivered.append(message)
        if len(self._undelivered) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._undelivered:
            if not self._inbox.post_nowait(self._undelivered[0]):
                asyncio.get_running_loop().call_later(RETRY_S, self._flush)
                return
            self._undelivered.popleft()
