"""Requests on an engine of this process, and when their tokens came."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Protocol

import anyio

from ....protocol.capacity import Capacity
from ....protocol.config import EngineConfig
from ....protocol.errors import RequestFailedError
from ....protocol.outputs import EngineStats, RequestOutput
from ....protocol.sampling import OutputKind, SamplingParams
from .metrics import Timeline
from .workloads import FIRST_PLAIN_ID, Workload, token_ids

Advance = Callable[[], None]
"""Tells a progress bar that one more is done."""

WARM_UP_PROMPTS = 4
WARM_UP_TOKENS = 64


class OutputStream(Protocol):
    """A request's outputs; closing it aborts the request."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    async def aclose(self) -> None: ...


class BenchEngine(Protocol):
    """What a benchmark needs of an engine."""

    @property
    def capacity(self) -> Capacity:
        """What the device offers."""
        ...

    def generate(self, prompt: list[int], sampling_params: SamplingParams) -> OutputStream:
        """Start a request."""
        ...

    async def stats(self) -> EngineStats:
        """A consistent snapshot."""
        ...


EngineFactory = Callable[[EngineConfig], AbstractAsyncContextManager[BenchEngine]]


def greedy(max_tokens: int, output_kind: OutputKind) -> SamplingParams:
    """What every benchmark asks for: `max_tokens` tokens, neither more nor fewer."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=output_kind)


def fitted(prompt: list[int], max_tokens: int, capacity: Capacity) -> list[int]:
    """`prompt` with ids that the model has, and room for `max_tokens`: as it is, for all but small models."""
    num_plain = max(1, capacity.vocab_size - FIRST_PLAIN_ID)
    first = min(FIRST_PLAIN_ID, capacity.vocab_size - 1)
    longest = max(1, capacity.max_model_len - max_tokens)
    return [first + (token - FIRST_PLAIN_ID) % num_plain for token in prompt[:longest]]


async def stream(
    engine: BenchEngine,
    prompt: list[int],
    max_tokens: int,
    *,
    kind: OutputKind = "delta",
    sent_s: float | None = None,
    note: Callable[[Timeline], None] = lambda _: None,
) -> Timeline:
    """Run one request to its end and return when its tokens came; `note` is given what there is after each.

    `sent_s` is when it was due, where that is not now: a request sent late has waited already. Raises how
    it was refused, or `RequestFailedError`.
    """
    timeline = Timeline(sent_s=time.perf_counter() if sent_s is None else sent_s, num_prompt=len(prompt))
    async with aclosing(engine.generate(prompt, greedy(max_tokens, kind))) as outputs:
        async for output in outputs:
            timeline.at_s.append(time.perf_counter())
            completion = output.outputs[0]
            timeline.num_output += len(completion.token_ids)
            timeline.num_cached = output.num_cached_tokens
            if completion.finish_reason == "error":
                raise RequestFailedError(str(completion.stop_reason))
            note(timeline)
    return timeline


async def run_together(
    engine: BenchEngine, workload: Workload, *, kind: OutputKind = "delta", advance: Advance = lambda: None
) -> list[Timeline]:
    """Send all of `workload` at once; return its requests' timelines in order."""
    found: dict[int, Timeline] = {}

    async def one(index: int, prompt: list[int]) -> None:
        found[index] = await stream(engine, prompt, workload.max_tokens, kind=kind, sent_s=sent_s)
        advance()

    prompts = [fitted(prompt, workload.max_tokens, engine.capacity) for prompt in workload.prompts]
    sent_s = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for index, prompt in enumerate(prompts):
            tasks.start_soon(one, index, prompt)
    return [found[index] for index in range(len(prompts))]


async def warm_up(engine: BenchEngine) -> None:
    """A few requests that nobody measures: a device does some things for the first time only."""
    prompts = [token_ids(WARM_UP_TOKENS, index) for index in range(WARM_UP_PROMPTS)]
    await run_together(engine, Workload("", "warm-up", prompts, 8))
