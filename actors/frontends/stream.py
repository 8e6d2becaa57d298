"""What a caller holds of a request: an iterator of outputs, whose end of life is the request's.

A `Delivery` is the engine's side (it stays in the table until the request's terminal has come), a
`RequestStream` the caller's. Only the caller holds the stream: dropping it, closing it or cancelling
whoever waits on it posts the request's `Abort`. A generator could not do that: leaving a loop over an
async generator that is still referenced closes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

import msgspec

from ...protocol.errors import Problem, RepertoryError, error_from, problem_of
from ...protocol.ids import RequestId
from ...protocol.journey import Journey
from ...protocol.messages import Metrics, Submit, TextDelta, Tokenized
from ...protocol.outputs import Logprob, RequestOutput
from ...protocol.sampling import MAX_N, FinishReason, OutputKind
from ..observing.tracing import Outcome, RequestTrace
from ..scheduling.journeys import handed_over
from .completion import Completion, by_token

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
        params = submit.params
        # Read before anybody has checked it: what is no sensible number is refused, and needs no completions.
        num_completions = params.n if type(params.n) is int and 1 <= params.n <= MAX_N else 1
        self.completions = [Completion(index, has_logprobs=params.logprobs is not None) for index in range(num_completions)]
        self.last: TextDelta | None = None
        self.metrics: Metrics | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.problem: Problem | None = None
        """Why no terminal will come: refused, or the engine has stopped."""
        self.is_over = False
        """Whether its terminal has come."""
        self.is_closed = False
        self.trace: RequestTrace | None = None
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the terminal has come, or never will."""
        return self.is_over or self.problem is not None

    def on_tokenized(self, message: Tokenized) -> None:
        """The prompt as the model sees it."""
        self.prompt = message.prompt
        self.prompt_token_ids = message.token_ids

    def on_delta(self, delta: TextDelta) -> None:
        """New text; the terminal is the last."""
        self.completions[delta.index].on_delta(delta)
        self.last = delta
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *map(by_token, delta.prompt_logprobs)]
        if delta.metrics is not None:
            self.metrics = msgspec.structs.replace(delta.metrics, arrival=self.arrival_s)
        if delta.finish_reason is not None and delta.is_terminal:
            self._end(delta, delta.finish_reason)
        elif self.kind != "final_only":
            self._has_news = True
        self._wake()

    def _end(self, delta: TextDelta, finish_reason: FinishReason) -> None:
        self.is_over = True
        for completion in self.completions:
            completion.end(finish_reason, delta.stop_reason)  # those that never came to open
        is_fault = delta.problem is not None and delta.problem.kind != "RequestFailedError"
        if is_fault and not any(completion.token_ids for completion in self.completions):
            self.problem = delta.problem  # refused: nothing came, and nothing will
        self._has_news = self.problem is None
        journey = delta.journey
        if journey is not None and self.trace is not None:
            since_s = time.monotonic() - self.arrival_s
            journey = handed_over(journey, since_s, since_s)
        self._end_trace(delta.problem, delta.num_cached_tokens, journey)

    def _end_trace(self, problem: Problem | None, num_cached_tokens: int = 0, journey: Journey | None = None) -> None:
        if self.trace is None:
            return
        outcome = Outcome(
            finish_reasons=[one.finish_reason or "error" for one in self.completions],
            num_prompt_tokens=len(self.prompt_token_ids),
            num_output_tokens=sum(len(one.token_ids) for one in self.completions),
            num_cached_tokens=num_cached_tokens,
            metrics=self.metrics,
            journey=journey,
            problem=problem,
        )
        self.trace.end(outcome)
        self.trace = None

    def fail(self, error: RepertoryError) -> None:
        """No terminal will come. What has arrived can still be read."""
        if not self.has_ended:
            self.problem = problem_of(error)
            self._end_trace(self.problem)
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
        last, kind, completions = self.last, self.kind, self.completions
        # Most have one, and a loop in brackets is a call.
        outputs = [completions[0].take(kind)] if len(completions) == 1 else [one.take(kind) for one in completions]
        return RequestOutput(
            request_id=self.label,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.is_over,
            num_cached_tokens=last.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
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
        grant: Callable[[RequestId, int, int], None],
        *,
        credit_window: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._delivery = delivery
        self._abort = abort
        self._grant = grant
        self._grant_from = max(1, credit_window // GRANTS_PER_WINDOW)

    @property
    def request_id(self) -> str:
        """The client's label, or the engine's id where there was none."""
        return self._delivery.label

    @property
    def id(self) -> RequestId:
        """The engine's id."""
        return self._delivery.request_id

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
        """The reader has taken an item: as many tokens more may be generated of each completion."""
        for completion in self._delivery.completions:
            taken = completion.num_seen_tokens - completion.num_granted
            if taken >= self._grant_from and completion.finish_reason is None:
                completion.num_granted += taken
                self._grant(self._delivery.request_id, taken, completion.index)

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
