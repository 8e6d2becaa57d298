"""The Detokenizer: sampled tokens to text, and the one place a request's terminal comes from."""

from __future__ import annotations

from collections import deque
from typing import Any

from ..protocol.messages import Abort, Refused, TextOut, Tokenized, TokensSampled
from .mailbox import Mailbox
from .text.detokenizer_core import DetokenizerCore


class Detokenizer:
    """Receives `TokensSampled` and `Refused`; sends `TextOut` to the frontend, `Abort(stop)` to the scheduler."""

    def __init__(
        self,
        core: DetokenizerCore,
        *,
        inbox: Mailbox[TokensSampled | Refused],
        frontend: Mailbox[TextOut | Tokenized],
        scheduler: Mailbox[Any],
    ) -> None:
        self.core = core
        self.inbox = inbox
        self._frontend = frontend
        self._scheduler = scheduler
        # The scheduler may be waiting for room in our inbox: never wait for room in its. At most one a request.
        self._unsent: deque[Abort] = deque()

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            timeout_s = 0.01 if self._unsent else float("inf")
            for message in await self.inbox.take(timeout_s=timeout_s):
                if isinstance(message, TokensSampled):
                    deltas, aborts = self.core.on_tokens(message)
                    self._unsent.extend(aborts)
                    # One that ends before its first token never opened. For all others this is no news.
                    for end in message.ended:
                        deltas += self.core.on_refused(Refused(end.request_id, end.problem))
                else:
                    deltas = self.core.on_refused(message)
                if deltas:
                    await self._frontend.post(TextOut(deltas))
            while self._unsent and self._scheduler.post_nowait(self._unsent[0]):
                self._unsent.popleft()
