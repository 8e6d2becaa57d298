"""The half of a company that stands beside a client: from a prompt to an `Admit`, and from tokens to text.

    frontend --Submit, Abort--> Tokenizer --Admit, Abort--> core
        ^                           | Refused
        |  TextOut                  v
        +---------------------- Detokenizer <--TokensSampled, Refused-- core

Where the core is, it does not know: `core` is a mailbox, the scheduler's own where both share a loop, a link's
outbox where the core is another process. Every frontend has a half of its own, and so an incarnation of its own:
no two of them ever make the same `RequestId`.
"""

from __future__ import annotations

import asyncio

import anyio

from ..protocol.errors import RepertoryError
from ..protocol.ids import RequestId, request_ids
from ..protocol.messages import Abort, Credit, Refused, Submit, TextOut, Tokenized, TokensSampled
from ..protocol.metrics import ActorLoad
from .detokenizer import Detokenizer
from .frontends.dispatcher import Dispatcher
from .mailbox import Mailbox
from .observing.loads import load_of
from .resolving import Resolver
from .scheduler import SchedulerInbox
from .supervising import supervised
from .tokenizer import Tokenizer

RETRY_S = 0.01
"""How soon a full inbox is tried again."""


class FrontendHalf:
    """Dispatcher, Tokenizer and Detokenizer, made and joined to `core`. `run` keeps them going until cancelled.

    `bound` is how many messages each mailbox holds unread.
    """

    def __init__(
        self, resolver: Resolver, core: Mailbox[SchedulerInbox], *, bound: int, incarnation: int | None = None
    ) -> None:
        self.resolver = resolver
        self.core = core
        self.new_id = request_ids(incarnation)
        self.submissions: Mailbox[Submit | Abort] = Mailbox("tokenizer", bound)
        self.samples: Mailbox[TokensSampled | Refused] = Mailbox("detokenizer", bound)
        texts: Mailbox[TextOut | Tokenized] = Mailbox("dispatcher", bound)
        self.dispatcher = Dispatcher(texts)
        self.tokenizer = Tokenizer(resolver, inbox=self.submissions, scheduler=core, detokenizer=self.samples, frontend=texts)
        self.detokenizer = Detokenizer(resolver.reader.tokenizer, inbox=self.samples, frontend=texts, scheduler=core)
        self.is_deserted = False
        self._mailboxes = (self.submissions, self.samples, texts)

    async def run(self) -> None:
        """Run the actors until cancelled. An exception that escapes one ends them all and is raised."""
        async with anyio.create_task_group() as actors:
            actors.start_soon(self.dispatcher.run)
            actors.start_soon(supervised, "detokenizer", self.detokenizer, self.samples.load)
            actors.start_soon(supervised, "tokenizer", self.tokenizer, self.submissions.load)

    def fail_all(self, error: RepertoryError) -> None:
        """The core has gone: whoever waits gets `error`, and nothing is sent any more."""
        self.is_deserted = True
        self.dispatcher.fail_all(error)

    def close(self) -> None:
        """Close the mailboxes; the core's is the core's."""
        for mailbox in self._mailboxes:
            mailbox.close()

    # ---- for streams, which cannot wait ----------------------------------------------------------

    def grant(self, request_id: RequestId, num_tokens: int, index: int) -> None:
        """Tell the scheduler that a reader has taken tokens; if there is no room, again a little later."""
        if not self.is_deserted and not self.core.post_nowait(Credit(request_id, num_tokens, index)):
            # Not left to the reader's next turn: it may wait for the very token that this credit is for.
            asyncio.get_running_loop().call_later(RETRY_S, self.grant, request_id, num_tokens, index)

    def abort_nowait(self, request_id: RequestId) -> None:
        """Post an `Abort` from a place that cannot wait; if there is no room, again a little later."""
        if not self.is_deserted and not self.submissions.post_nowait(Abort(request_id)):
            asyncio.get_running_loop().call_later(RETRY_S, self.abort_nowait, request_id)

    # ---- facts ----------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is anywhere in this half."""
        return not any(self.tables().values()) and not self.has_mail

    @property
    def has_mail(self) -> bool:
        """Whether a message is unread in this half."""
        return any(len(mailbox) for mailbox in self._mailboxes)

    def actor_loads(self, process: str = "") -> list[ActorLoad]:
        """Of the actors here, which live in `process`."""
        return [load_of(mailbox, process) for mailbox in self._mailboxes]

    def tables(self) -> dict[str, int]:
        """What each table holds; nothing, once no request is live."""
        return {
            "detokenizer": len(self.detokenizer.core),
            "detokenizer's account": len(self.detokenizer.told),
            "tokenizer": self.tokenizer.num_reading,
            "frontend": len(self.dispatcher),
        }
