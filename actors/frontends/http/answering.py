"""From a checked request to its answer: submit its prompts, then write what comes, at the pace of whoever reads it.

A stream's head is not sent before the first output has come, so that what is refused is refused with its status. From
then on each output is one `send`, which waits while the client's socket is full; what is not sent is not taken from the
engine, which then pauses the request: a slow reader holds up only itself.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import anyio

from ....gpu.sampling_edits import NO_TOKEN_LEFT
from ....protocol.errors import RequestFailedError, ValidationError
from ....protocol.outputs import RequestOutput
from ....protocol.sampling import SamplingParams
from ..face import EngineFace, Prompt
from ..stream import RequestStream
from .exchange import Exchange
from .forms import Form
from .presence import while_present
from .responses import Usage, usage_of
from .sending import DONE, begin_events, end_events, send_events, send_json


@dataclass(frozen=True)
class Call:
    """What a request asks of the engine, and how its answer is written."""

    prompts: list[Prompt]
    params: SamplingParams
    form: Form
    is_stream: bool
    priority: int = 0
    tenant: str | None = None
    cache_salt: str | None = None
    trace_context: dict[str, str] | None = None


Lasts = dict[int, RequestOutput]
"""The last output of each prompt, by its number."""


async def answer(engine: EngineFace, exchange: Exchange, call: Call) -> None:
    """Generate and answer. Whatever way this ends, nothing of the request stays in the engine.

    Raises the engine's errors, `HttpError`, `ClientGone` and `ReaderStuckError`; with a stream also after it has begun.
    """
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(_submit(engine, exchange, call, prompt)) for prompt in call.prompts]
        writer = _Writer(exchange, call, streams)
        await while_present(exchange, writer.write, max_pause_s=engine.config.max_pause_s)


def _submit(engine: EngineFace, exchange: Exchange, call: Call, prompt: Prompt) -> RequestStream:
    return engine.generate(
        prompt,
        call.params,
        exchange.request_id,
        priority=call.priority,
        tenant=call.tenant,
        cache_salt=call.cache_salt,
        trace_context=call.trace_context,
    )


class _Writer:
    """Reads a request's streams and writes its answer."""

    def __init__(self, exchange: Exchange, call: Call, streams: list[RequestStream]) -> None:
        self._exchange = exchange
        self._call = call
        self._streams = streams
        self._num_generated = 0
        """Tokens, counted as they come; a final output brings all."""
        self._num_unheard = len(streams)
        """Prompts of which nothing has come yet."""
        self._all_heard = anyio.Event()

    async def write(self) -> None:
        """Write all of it."""
        lasts = await self._read_all(self._stream if self._call.is_stream else self._gather)
        outputs = [lasts[number] for number in range(len(self._streams))]
        usage = self._usage(outputs)
        if self._call.is_stream:
            await end_events(self._exchange.send, self._call.form.usage_event(usage) + DONE)
            return
        _check_successful(outputs)
        await send_json(self._exchange.send, self._call.form.whole(outputs, usage))

    async def _read_all(self, read: Callable[[int, RequestStream, Lasts], Coroutine[Any, Any, None]]) -> Lasts:
        lasts: Lasts = {}
        if len(self._streams) == 1:
            await read(0, self._streams[0], lasts)
            return lasts
        async with anyio.create_task_group() as readers:
            for number, stream in enumerate(self._streams):
                readers.start_soon(read, number, stream, lasts)
        return lasts

    async def _gather(self, number: int, stream: RequestStream, lasts: Lasts) -> None:
        async for output in stream:
            self._count(output)
            lasts[number] = output
        await self._call.form.prepare(lasts[number], number * self._call.params.n)

    async def _stream(self, number: int, stream: RequestStream, lasts: Lasts) -> None:
        form, send, first = self._call.form, self._exchange.send, number * self._call.params.n
        async for output in stream:
            self._count(output)
            if number not in lasts:
                if output.finished:
                    _check_successful([output])
                await form.prepare(output, first)
                await self._begin()
            lasts[number] = output
            if events := form.events(output, first):
                await send_events(send, events)
        _check_successful([lasts[number]])

    def _count(self, output: RequestOutput) -> None:
        for one in output.outputs:
            self._num_generated += len(one.token_ids)

    def _usage(self, outputs: list[RequestOutput]) -> Usage:
        """Of all prompts, by their last outputs."""
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        return usage_of(num_prompt, self._num_generated if self._call.form.has_output else 0, num_cached)

    async def _begin(self) -> None:
        """Send the head, once something has come of every prompt: none of them has been refused."""
        self._num_unheard -= 1
        if self._num_unheard:
            await self._all_heard.wait()
        else:
            await begin_events(self._exchange.send)
            self._all_heard.set()


def _check_successful(outputs: list[RequestOutput]) -> None:
    """Raise where a prompt's completions have all failed; one that failed beside others says so itself."""
    for output in outputs:
        if all(one.finish_reason == "error" for one in output.outputs):
            reason = str(output.outputs[0].stop_reason or "the request failed")
            raise ValidationError(reason) if reason == NO_TOKEN_LEFT else RequestFailedError(reason)
