"""The Detokenizer: sampled tokens to text, and the one place a request's terminal comes from.

Its core can be made anew at any moment. Two accounts survive a crash: `told`, for every open request how
much text and how many tokens of each sequence have been handed over, and `over`, whose terminals have been. The new core gets
the tokens of each open request again from the scheduler (`Resend`) and keeps to itself what has been handed
over already.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque

import msgspec
from tokenizers import Tokenizer as TextTokenizer

from ..protocol.errors import Problem
from ..protocol.ids import RequestId
from ..protocol.messages import Closed, Refused, Resend, TextDelta, TextOut, Tokenized, TokensSampled
from .mailbox import Mailbox
from .scheduler import SchedulerInbox
from .text.detokenizer_core import REMEMBERED, DetokenizerCore

RETRY_S = 0.01


class Told(msgspec.Struct, frozen=True, gc=False):
    """What the frontend has been told of a sequence."""

    num_characters: int
    num_tokens: int
    has_ended: bool = False


NOTHING = Told(0, 0)


class Detokenizer:
    """Receives `TokensSampled` and `Refused`; sends `TextOut` to the frontend, `Abort`, `Closed`, `Resend` to the scheduler."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        inbox: Mailbox[TokensSampled | Refused],
        frontend: Mailbox[TextOut | Tokenized],
        scheduler: Mailbox[SchedulerInbox],
    ) -> None:
        self.inbox = inbox
        self.core = DetokenizerCore(tokenizer)
        self.told: dict[RequestId, dict[int, Told]] = {}
        self.over: OrderedDict[RequestId, None] = OrderedDict()
        self._tokenizer = tokenizer
        self._frontend = frontend
        self._scheduler = scheduler
        self._batch: deque[TokensSampled | Refused] = deque()
        self._replayed: dict[tuple[RequestId, int], Told] = {}
        self._asked: set[RequestId] = set()
        # The scheduler may be waiting for room in our inbox: never wait for room in its. A few a request at most.
        self._unsent: deque[SchedulerInbox] = deque()

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            if not self._batch:
                self._batch.extend(await self.inbox.take(timeout_s=RETRY_S if self._unsent else float("inf")))
            while self._batch:
                # Still in the batch while it is handled: a crash is known to be this message's.
                await self._handle(self._batch[0])
                self._batch.popleft()
            while self._unsent and self._scheduler.post_nowait(self._unsent[0]):
                self._unsent.popleft()

    async def recover(self) -> None:
        """A new core. Whatever was open is asked for again; the message that was at hand is not handled twice."""
        culprit = self._batch.popleft() if self._batch else None
        if isinstance(culprit, TokensSampled):
            self._enter(culprit)  # nobody will say again that these have opened, unless they are asked for
        awaited = {
            request_id: [index for index, told in by_index.items() if told.has_ended]
            for request_id, by_index in self.told.items()
        }
        self.core = DetokenizerCore(self._tokenizer, closed=self.over, awaited=awaited)
        self._replayed = {
            (request_id, index): told
            for request_id, by_index in self.told.items()
            for index, told in by_index.items()
            if not told.has_ended
        }
        if isinstance(culprit, TokensSampled):
            self._asked.difference_update(opening.request_id for opening in culprit.opened)
        # What an earlier crash asked for and has not come yet is on its way: twice told would be twice handed over.
        self._unsent.extend(Resend(request_id) for request_id in self.told if request_id not in self._asked)
        self._asked.update(self.told)
        for request_id, problem in _unopened(culprit):
            if request_id in self.told or request_id in self.over:
                continue
            if problem is None:
                terminal = TextDelta(request_id, "", [], "abort")
            else:
                terminal = TextDelta(request_id, "", [], "error", problem.message, problem)
            await self._hand_over([terminal])

    async def _handle(self, message: TokensSampled | Refused) -> None:
        # What is over here and ends there (after a stop string, or said twice) is closed there now, if it was not before.
        self._unsent.extend(Closed([request_id]) for request_id, _ in _unopened(message) if request_id in self.over)
        if isinstance(message, TokensSampled):
            self._enter(message)
            deltas, aborts = self.core.on_tokens(message)
            self._unsent.extend(aborts)
            self._asked.difference_update(opening.request_id for opening in message.opened)
        else:
            deltas = self.core.on_refused(message)
        await self._hand_over(deltas)

    def _enter(self, message: TokensSampled) -> None:
        """Requests that open with this message are open here, with nothing told of them yet."""
        for opening in message.opened:
            if opening.request_id not in self.over:
                self.told.setdefault(opening.request_id, {})

    async def _hand_over(self, deltas: list[TextDelta]) -> None:
        if self._replayed:
            deltas = [unheard for delta in deltas if (unheard := self._unheard(delta)) is not None]
        if not deltas:
            return
        made_s = time.monotonic()
        await self._frontend.post(TextOut(deltas))
        sent_s = time.monotonic()
        closed = []
        for delta in deltas:
            if delta.is_terminal:
                closed.append(delta.request_id)
                self.told.pop(delta.request_id, None)
                self.over[delta.request_id] = None
            else:
                told = self.told[delta.request_id]
                before = told.get(delta.index, NOTHING)
                told[delta.index] = Told(
                    before.num_characters + len(delta.text),
                    before.num_tokens + len(delta.token_ids),
                    delta.finish_reason is not None,
                )
        if closed:
            self._unsent.append(Closed(closed, [(made_s, sent_s)] * len(closed)))
            while len(self.over) > REMEMBERED:
                self.over.popitem(last=False)

    def _unheard(self, delta: TextDelta) -> TextDelta | None:
        """A replayed delta without what was handed over before the crash; None when nothing is left of it."""
        heard = self._replayed.pop((delta.request_id, delta.index), None)
        if heard is None:
            return delta
        text, token_ids = delta.text[heard.num_characters :], delta.token_ids[heard.num_tokens :]
        if not text and not token_ids and delta.finish_reason is None:
            return None
        logprobs = delta.logprobs[heard.num_tokens :]
        return msgspec.structs.replace(delta, text=text, token_ids=token_ids, logprobs=logprobs)


def _unopened(message: TokensSampled | Refused | None) -> list[tuple[RequestId, Problem | None]]:
    """Requests that end with this message and may never have opened, and why: nobody will say it again."""
    if message is None:
        return []
    if isinstance(message, Refused):
        return [(message.request_id, message.problem)]
    return [(end.request_id, end.problem) for end in message.ended]
