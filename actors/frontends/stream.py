"""What a caller holds of a request: an iterator of outputs, whose end of life is the request's.

A `Delivery` is the engine's side (it stays in the table until the request's terminal has come), a
`RequestStream` the caller's. Only the caller holds the stream: dropping it, closing it or cancelling
whoever waits on it posts the request's `Abort`. A generator could not do that: leaving a loop over an
async generator that is still referenced closes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

import msgspec

from ...protocol.errors import Problem, RepertoryError, error_from, problem_of
from ...protocol.ids import RequestId
from ...protocol.messages import Metrics, Submit, TextDelta, Tokenized
from ...protocol.outputs import CompletionOutput, RequestOutput
from ...protocol.sampling import OutputKind

GRANTS_PER_WINDOW = 4
"""Credit is granted in quarters of the window: a message for hundreds of tokens, and never a reader that waits for it."""


class Delivery:
    """What has arrived for one request, and whether its reader has seen it. Slow readers find it merged."""

    def __init__(self, submit: Submit) -> None:
        self.request_id: RequestId = submit.request_id
        self.label = submit.label
        self.kind: OutputKind = submit.params.output_kind
        self.arrival_s = submit.arrival_s
        self.prompt = submit.prompt if isinstance(submit.prompt, str) else None
        self.prompt_token_ids: list[int] = []
        self._text = ""  # what its reader has taken; the copy that adding to it makes is then of a string that is read anyway
        self._new_text = ""
        self.token_ids: list[int] = []
        self.last: TextDelta | None = None
        self.metrics: Metrics | None = None
        self.problem: Problem | None = None
        """Why no terminal will come: refused, or the engine has stopped."""
        self.is_closed = False
        self.num_seen_tokens = 0
        """Tokens its reader has taken."""
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the terminal has come, or never will."""
        return self.problem is not None or (self.last is not None and self.last.finish_reason is not None)

    def on_tokenized(self, message: Tokenized) -> None:
        """The prompt as the model sees it."""
        self.prompt = message.prompt
        self.prompt_token_ids = message.token_ids

    def on_delta(self, delta: TextDelta) -> None:
        """New text; the terminal is the last."""
        self._new_text += delta.text
        self.token_ids += delta.token_ids
        self.last = delta
        if delta.metrics is not None:
            self.metrics = msgspec.structs.replace(delta.metrics, arrival=self.arrival_s)
        if delta.problem is not None and not self.token_ids and delta.problem.kind != "RequestFailedError":
            self.problem = delta.problem  # refused: nothing came, and nothing will
        self._has_news = self.problem is None and (self.kind != "final_only" or delta.finish_reason is not None)
        self._wake()

    def fail(self, error: RepertoryError) -> None:
        """No terminal will come. What has arrived can still be read."""
        if not self.has_ended:
            self.problem = problem_of(error)
            self._wake()

    def close(self) -> None:
        """The reader wants nothing more."""
        self.is_closed = True
        self._wake()

    async def next_output(self) -> RequestOutput | None:
        """Wait for news; None when everything has been read. Raises how the request was refused or lost."""
        while True:
            if self.is_closed:
                return None
            if self._has_news:
                return self._output()
            if self.problem is not None:
                # A new one for each reader: an exception keeps the frames, and so the streams, of whoever it passed.
                raise error_from(self.problem)
            if self.has_ended:
                return None
            await self._news()

    async def _news(self) -> None:
        if self._waiter is not None:
            raise RuntimeError(f"request {self.label}: two tasks iterate over one stream")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _output(self) -> RequestOutput:
        assert self.last is not None
        self._has_news = False
        last = self.last
        new_text, self._new_text = self._new_text, ""
        token_ids = self.token_ids
        if self.kind == "delta":
            text, token_ids = new_text, token_ids[self.num_seen_tokens :]
        else:
            text = self._text = self._text + new_text
        self.num_seen_tokens = len(self.token_ids)
        completion = CompletionOutput(
            index=0, text=text, token_ids=list(token_ids), finish_reason=last.finish_reason, stop_reason=last.stop_reason
        )
        return RequestOutput(
            request_id=self.label,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            finished=last.finish_reason is not None,
            num_cached_tokens=last.num_cached_tokens,
            metrics=self.metrics,
        )


class RequestStream:
    """Async iterator over a request's `RequestOutput`s; also an async context manager.

    Raises, while iterating: the `RequestError` of a request that was refused, `EngineDeadError` when
    the engine stopped. Leaving it in any way before its end aborts the request and frees its blocks.
    """

    def __init__(
        self,
        delivery: Delivery,
        abort: Callable[[RequestId], None],
        grant: Callable[[RequestId, int], None],
        *,
        credit_window: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._delivery = delivery
        self._abort = abort
        self._grant = grant
        self._grant_from = max(1, credit_window // GRANTS_PER_WINDOW)
        self._num_granted = 0

    @property
    def request_id(self) -> str:
        """The client's label, or the engine's id where there was none."""
        return self._delivery.label

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            output = await self._delivery.next_output()
        except asyncio.CancelledError:
            self._leave()
            raise
        if output is None:
            raise StopAsyncIteration
        self._take_note()
        return output

    def _take_note(self) -> None:
        """The reader has taken an item: as many tokens more may be generated for it."""
        taken = self._delivery.num_seen_tokens - self._num_granted
        if taken >= self._grant_from and not self._delivery.has_ended:
            self._num_granted += taken
            self._grant(self._delivery.request_id, taken)

    async def aclose(self) -> None:
        """Abort the request unless it has ended. Idempotent."""
        self._leave()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        if not self._delivery.has_ended and not self._delivery.is_closed:
            self._abort(self._delivery.request_id)
        self._delivery.close()

    def __del__(self) -> None:
        # The last reference may go in any thread, and after the loop has gone.
        delivery = self._delivery
        if not delivery.has_ended and not delivery.is_closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort, delivery.request_id)
