"""The engine for code that is not asynchronous: `LLM(model="demo").generate(["a", "b"])`."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.to_thread
import msgspec
from anyio.from_thread import start_blocking_portal
from tqdm import tqdm

from ...protocol.config import EngineConfig
from ...protocol.errors import EngineDeadError, ValidationError, first_of, shorten
from ...protocol.outputs import BeamSearchOutput, RequestOutput
from ...protocol.sampling import BeamSearchParams, SamplingParams, check_beams
from .engine import Engine
from .face import Prompt

Messages = list[dict[str, Any]]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LLM:
    """A blocking engine: an event loop in a thread of its own, closed by `close`, `with`, or the garbage collector.

    `LLM(EngineConfig(...))` and `LLM(model=..., ...)` are the same. Raises `ConfigError`, `ModelLoadError`.
    """

    def __init__(self, config: EngineConfig | None = None, **settings: Any) -> None:
        engine = Engine(config, **settings)
        self._limit: anyio.CapacityLimiter | None = None  # shared by calls from several threads; made on the loop
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal("asyncio"))
            self.engine = stack.enter_context(self._portal.wrap_async_context_manager(engine))
            # At the interpreter's exit too, before it stops the loop's thread: nothing could be closed after that.
            self._close = weakref.finalize(self, stack.pop_all().close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt; results in the order of the prompts.

        `prompts` is one prompt (text or token ids) or a list of them, `sampling_params` one for all or one
        each. The whole list is validated before any starts: a wrong one raises its `RequestError`.
        """
        listed = _listed(prompts)
        return self._complete(listed, _spread(sampling_params, len(listed)), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several."""
        single = bool(messages) and isinstance(messages[0], dict)
        listed: list[Prompt] = [messages] if single else list(messages)  # type: ignore[list-item, arg-type]
        return self._complete(listed, _spread(sampling_params, len(listed)), use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt; results in the order of the prompts, each the best first.

        The whole list is validated before any starts: a wrong one raises its `RequestError`.
        """
        return self._call(self._run_searches, _listed(prompts), params, use_tqdm)

    def close(self) -> None:
        """Stop the engine and its thread. Idempotent."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _complete(self, prompts: list[Prompt], params: list[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        return self._call(self._run, prompts, params, use_tqdm)

    def _call(self, function: Callable[[Unpack[Ts]], Awaitable[T]], *arguments: *Ts) -> T:
        """Run `function` on the engine's loop; interrupted, it is cancelled."""
        if not self._close.alive:
            raise EngineDeadError("this LLM has been closed")
        run: Future[T] | None = None
        try:
            run = self._portal.start_task_soon(function, *arguments)
            return run.result()
        except ExceptionGroup as group:
            raise first_of(group) from None
        except BaseException:
            if run is not None:
                run.cancel()  # interrupted while it waited: nobody wants the rest
            raise

    async def _run(self, prompts: list[Prompt], params: list[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        engine = self.engine
        finals = [msgspec.structs.replace(one, output_kind="final_only") for one in params]
        resolved = await anyio.to_thread.run_sync(engine.resolve_all, prompts, finals)
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        limit = self._limit = self._limit or anyio.CapacityLimiter(engine.config.max_num_queued + engine.config.running_limit)
        with tqdm(total=len(prompts), unit="prompt", disable=not (use_tqdm and sys.stderr.isatty())) as bar:
            meter = _Meter(bar)

            async def complete(index: int) -> None:
                # No more at a time than may wait: a list longer than the queue is fed in as it empties.
                async with limit, engine.start_resolved(resolved[index], params=finals[index]) as stream:
                    async for output in stream:
                        outputs[index] = output
                        meter.add(sum(len(completion.token_ids) for completion in output.outputs))

            async with anyio.create_task_group() as group:
                for index in range(len(prompts)):
                    group.start_soon(complete, index)
        return [output for output in outputs if output is not None]

    async def _run_searches(self, prompts: list[Prompt], params: BeamSearchParams, use_tqdm: bool) -> list[BeamSearchOutput]:
        engine = self.engine
        check_beams(params)
        sampling = SamplingParams(max_tokens=params.max_tokens)
        await anyio.to_thread.run_sync(engine.resolve_all, prompts, [sampling] * len(prompts))
        outputs: list[BeamSearchOutput | None] = [None] * len(prompts)
        # No more beams at a time than may run: what holds KV for its children and waits for others' would only lose it.
        limit = anyio.CapacityLimiter(max(1, engine.config.running_limit // params.beam_width))
        with tqdm(total=len(prompts), unit="prompt", disable=not (use_tqdm and sys.stderr.isatty())) as bar:

            async def search(index: int) -> None:
                async with limit:
                    outputs[index] = await engine.beam_search(prompts[index], params)
                bar.update()

            async with anyio.create_task_group() as group:
                for index in range(len(prompts)):
                    group.start_soon(search, index)
        return [output for output in outputs if output is not None]


class _Meter:
    """Tokens per second beside a progress bar."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self.bar = bar
        self.num_tokens = 0
        self.started = time.monotonic()

    def add(self, num_tokens: int) -> None:
        """One more prompt is done."""
        self.num_tokens += num_tokens
        self.bar.set_postfix_str(f"{self.num_tokens / (time.monotonic() - self.started):.0f} tok/s", refresh=False)
        self.bar.update()


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    if prompts and isinstance(prompts[0], dict):
        raise ValidationError("chat messages go to LLM.chat", field="prompts")
    return list(prompts)  # type: ignore[arg-type]


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise ValidationError(
            f"sampling_params must be SamplingParams or a list of them, got {shorten(params)}", field="sampling_params"
        )
    if len(params) != count:
        raise ValidationError(f"{len(params)} sampling_params for {count} prompts", field="sampling_params")
    return list(params)
