"""Measuring the five fixed workloads. Each function runs one repetition and returns its figures by key.

What is counted follows the measurements of other engines: B is the rate after the first token, and in
E the gaps before the long prompt came are kept apart from those that overlap its prefill.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import anyio

from . import workloads
from .drive import Advance, BenchEngine, fitted, run_together, stream, warm_up
from .metrics import Timeline, percentile
from .show import Column, Figure

TOKENS_BEFORE = 32
"""In E: tokens each stream has before the long prompt comes."""

Values = dict[str, float]


class Measure(NamedTuple):
    """A workload: its name, what it is in words, its figures (key -> name and unit), and how to run one repetition."""

    key: str
    title: str
    figures: Mapping[str, Column]
    run: Callable[[BenchEngine, int, Advance], Awaitable[Values]]
    num_requests: int


async def repeat(measure: Measure, engine: BenchEngine, repetitions: int, advance: Advance = lambda: None) -> list[Figure]:
    """Warm `engine` up, run `measure` `repetitions` times, and return what was found."""
    await warm_up(engine)
    runs = [await measure.run(engine, repetition, advance) for repetition in range(1, repetitions + 1)]
    return [Figure(key, *column, [run[key] for run in runs]) for key, column in measure.figures.items()]


async def _offline(engine: BenchEngine, repetition: int, advance: Advance) -> Values:
    timelines = await run_together(engine, workloads.offline(repetition), kind="final_only", advance=advance)
    return _throughput(timelines)


async def _prefix(engine: BenchEngine, repetition: int, advance: Advance) -> Values:
    timelines = await run_together(engine, workloads.prefix(repetition), kind="final_only", advance=advance)
    num_prompt = sum(timeline.num_prompt for timeline in timelines)
    cached = 100 * sum(timeline.num_cached for timeline in timelines) / num_prompt
    return _throughput(timelines) | {"cached_share": cached}


async def _latency(engine: BenchEngine, repetition: int, advance: Advance) -> Values:
    (timeline,) = await run_together(engine, workloads.latency(repetition), advance=advance)
    tpot_s = timeline.tpot_s or float("nan")
    return {
        "decode_throughput": 1 / tpot_s,
        "ttft_ms": 1e3 * timeline.ttft_s,
        "e2el_ms": 1e3 * timeline.e2el_s,
        "p99_itl_ms": 1e3 * percentile(timeline.gaps_s, 0.99),
    }


async def _ttft(engine: BenchEngine, repetition: int, advance: Advance) -> Values:
    (timeline,) = await run_together(engine, workloads.ttft(repetition), advance=advance)
    return {"ttft_ms": 1e3 * timeline.ttft_s, "prefill_throughput": timeline.num_prompt / timeline.ttft_s}


async def _itl(engine: BenchEngine, repetition: int, advance: Advance) -> Values:
    """Start the streams, send the long prompt when all of them decode, and end when it has its first token."""
    workload = workloads.itl_streams(repetition)
    prompts = [fitted(prompt, workload.max_tokens, engine.capacity) for prompt in workload.prompts]
    found: dict[int, Timeline] = {}
    decoding: set[int] = set()
    ready = anyio.Event()

    async def one(index: int) -> None:
        def note(timeline: Timeline) -> None:
            found[index] = timeline
            if timeline.num_output >= TOKENS_BEFORE:
                is_decoding(index)

        await stream(engine, prompts[index], workload.max_tokens, note=note)
        is_decoding(index)  # or was: a model for short texts may end it sooner

    def is_decoding(index: int) -> None:
        decoding.add(index)
        if len(decoding) == len(prompts):
            ready.set()

    async with anyio.create_task_group() as tasks:
        for index in range(len(prompts)):
            tasks.start_soon(one, index)
        await ready.wait()
        long_prompt = fitted(workloads.itl_long_prompt(repetition), 1, engine.capacity)
        long = await stream(engine, long_prompt, 1)
        tasks.cancel_scope.cancel()
    advance()
    return gap_figures(list(found.values()), long)


def gap_figures(timelines: list[Timeline], long: Timeline) -> Values:
    """Gaps of `timelines` before `long` was sent, and those that overlap the time to its first token."""
    arrived_s, first_s = long.sent_s, long.sent_s + long.ttft_s
    before: list[float] = []
    during: list[float] = []
    for timeline in timelines:
        for start_s, end_s in zip(timeline.at_s, timeline.at_s[1:], strict=False):
            if end_s <= arrived_s:
                before.append(1e3 * (end_s - start_s))
            elif start_s < first_s:
                during.append(1e3 * (end_s - start_s))
    return {
        "before_p50_ms": percentile(before, 0.5),
        "before_max_ms": percentile(before, 1.0),
        "during_p50_ms": percentile(during, 0.5),
        "during_max_ms": percentile(during, 1.0),
        "ttft_ms": 1e3 * long.ttft_s,
    }


def _throughput(timelines: list[Timeline]) -> Values:
    seconds = max(timeline.at_s[-1] for timeline in timelines) - min(timeline.sent_s for timeline in timelines)
    num_output = sum(timeline.num_output for timeline in timelines)
    num_prompt = sum(timeline.num_prompt for timeline in timelines)
    return {
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_prompt + num_output) / seconds,
        "duration": seconds,
    }


_THROUGHPUT = {
    "output_throughput": Column("output throughput", "tok/s"),
    "total_token_throughput": Column("total token throughput", "tok/s"),
    "duration": Column("duration", "s"),
}
_TTFT = {"ttft_ms": Column("TTFT", "ms")}

OFFLINE = Measure("offline", "A, offline: 64 requests, 256 tokens in, 64 out, all at once", _THROUGHPUT, _offline, 64)
LATENCY = Measure(
    "latency",
    "B, latency: one stream, 128 tokens in, 128 out",
    {
        "decode_throughput": Column("rate after the first token", "tok/s"),
        **_TTFT,
        "e2el_ms": Column("E2EL", "ms"),
        "p99_itl_ms": Column("ITL P99", "ms"),
    },
    _latency,
    1,
)
PREFIX = Measure(
    "prefix",
    "C, prefix: 32 requests share 1,024 tokens and own 32, 32 out",
    {**_THROUGHPUT, "cached_share": Column("prompt tokens cached", "%")},
    _prefix,
    32,
)
TTFT = Measure(
    "ttft",
    "D, ttft: the first token of 2,048",
    {**_TTFT, "prefill_throughput": Column("prefill throughput", "tok/s")},
    _ttft,
    1,
)
ITL = Measure(
    "itl",
    "E, itl: 8 streams decode when a prompt of 4,096 tokens comes",
    {
        "before_p50_ms": Column("gap before it, P50", "ms"),
        "before_max_ms": Column("gap before it, max", "ms"),
        "during_p50_ms": Column("gap while it is prefilled, P50", "ms"),
        "during_max_ms": Column("gap while it is prefilled, max", "ms"),
        "ttft_ms": Column("its TTFT", "ms"),
    },
    _itl,
    1,
)
