"""The Tokenizer: prompts to token ids, off the event loop, one thread for the short and one for the long.

Short prompts keep their order among themselves; a 20 MB prompt or a conversation of 5,000 messages
takes the other thread and holds nobody up. A third thread is for requests whose grammar has to be compiled.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import anyio
import anyio.to_thread

from ..protocol.conversation import Conversation
from ..protocol.errors import RequestError, problem_of
from ..protocol.ids import RequestId, show_request_id
from ..protocol.messages import Abort, Admit, Message, Refused, Submit, TextOut, Tokenized, TokensSampled
from .mailbox import Mailbox
from .observing.logs import logger
from .resolving import Resolver
from .text.weighing import weight_of

SHORT_PROMPT = 32_768
"""Characters or ids up to which a prompt counts as short."""
SHORT_CHAT = 64
"""Messages up to which a conversation does."""


class Tokenizer:
    """Receives `Submit` and `Abort`; sends `Admit` and `Abort` to the scheduler, `Refused` to the detokenizer."""

    def __init__(
        self,
        resolver: Resolver,
        *,
        inbox: Mailbox[Submit | Abort],
        scheduler: Mailbox[Any],
        detokenizer: Mailbox[TokensSampled | Refused],
        frontend: Mailbox[TextOut | Tokenized],
    ) -> None:
        self.resolver = resolver
        self.inbox = inbox
        self._scheduler = scheduler
        self._detokenizer = detokenizer
        self._frontend = frontend
        self._reading: dict[RequestId, Submit] = {}
        self._batch: deque[Submit | Abort] = deque()
        # What is decided is written down here before it is sent: a crash while somebody waits for room loses nothing.
        self._unsent: deque[tuple[Mailbox[Any], Message]] = deque()
        self._sending = anyio.Lock(fast_acquire=True)
        self._log = logger("tokenizer")
        self._short = anyio.CapacityLimiter(1)
        self._long = anyio.CapacityLimiter(1)
        self._compiling = anyio.CapacityLimiter(1)

    @property
    def num_reading(self) -> int:
        """Requests that have not left here yet."""
        return len(self._reading) + len(self._unsent)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with anyio.create_task_group() as readers:
            for submit in list(self._reading.values()):
                readers.start_soon(self._read, submit)  # what a crash interrupted
            await self._send_all()
            while True:
                if not self._batch:
                    self._batch.extend(await self.inbox.take())
                while self._batch:
                    message = self._batch.popleft()
                    if isinstance(message, Submit):
                        self._reading[message.request_id] = message
                        readers.start_soon(self._read, message)
                    else:
                        await self.on_abort(message)

    async def recover(self) -> None:
        """Nothing to make anew: what was being read is kept, and read again by the next `run`."""

    async def on_abort(self, message: Abort) -> None:
        """End the request here if it is still being read; else it is the scheduler's to end."""
        if self._reading.pop(message.request_id, None) is not None:
            self._unsent.append((self._detokenizer, Refused(message.request_id)))
        else:
            self._unsent.append((self._scheduler, message))
        await self._send_all()

    async def _read(self, submit: Submit) -> None:
        try:
            tokenized, admit = await anyio.to_thread.run_sync(self._resolve, submit, limiter=self._line_of(submit))
        except Exception as error:
            await self._refuse(submit, error)
            return
        if submit.request_id in self._reading:
            await self._frontend.post(tokenized)
        if self._reading.pop(submit.request_id, None) is not None:
            # From here on an `Abort` follows the `Admit` through the same queue, so it cannot come before it.
            self._unsent.append((self._scheduler, admit))
            await self._send_all()

    def _line_of(self, submit: Submit) -> anyio.CapacityLimiter:
        if not _is_short(submit.prompt):
            return self._long
        has_grammar = getattr(submit.params, "structured_outputs", None) is not None
        return self._compiling if has_grammar else self._short

    async def _send_all(self) -> None:
        """Send what is decided, in order, waiting for room where a box is full."""
        async with self._sending:
            while self._unsent:
                box, message = self._unsent[0]
                await box.post(message)
                self._unsent.popleft()

    def _resolve(self, submit: Submit) -> tuple[Tokenized, Admit]:
        if submit.request_id not in self._reading:
            # Aborted while it stood in line: its work is not done. (The set is only read here.)
            raise RequestError("aborted")
        try:
            return self.resolver.resolve(submit)
        except Exception:
            raise
        except BaseException as error:
            # A panic of the tokenizer's Rust code is no `Exception`; left alone it would end everything.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    async def _refuse(self, submit: Submit, error: Exception) -> None:
        if self._reading.pop(submit.request_id, None) is None:
            return
        request_id = show_request_id(submit.request_id)
        if isinstance(error, RequestError):
            field = getattr(error, "field", None)
            self._log.info("request.refused", request_id=request_id, label=submit.label, reason=str(error), field=field)
        else:
            self._log.error("request.failed", request_id=request_id, label=submit.label, reason=repr(error), exc_info=error)
        self._unsent.append((self._detokenizer, Refused(submit.request_id, problem_of(error))))
        await self._send_all()


def _is_short(prompt: Any) -> bool:
    if isinstance(prompt, Conversation):
        beside = weight_of((prompt.tools, prompt.template_kwargs), most=SHORT_PROMPT)
        return beside <= SHORT_PROMPT and _is_short(prompt.messages)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return len(prompt) <= SHORT_CHAT and sum(map(_num_characters, prompt)) <= SHORT_PROMPT
    return not hasattr(prompt, "__len__") or len(prompt) <= SHORT_PROMPT


def _num_characters(message: Any) -> int:
    """Of a message's text, for next to nothing. What is no message counts nothing: the resolver says what is wrong."""
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else [content]
    if len(parts) > SHORT_PROMPT:
        return len(parts)
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return sum(len(text) for text in texts if isinstance(text, str))
