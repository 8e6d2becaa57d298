"""Measuring a server over HTTP, as `vllm bench serve` does: same words, same formulas, the same layout."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import anyio

from .arrivals import poisson_times
from .drive import Advance
from .metrics import Timeline, latencies_ms, num_good, spread

WIDTH = 50
"""Characters in a line of the report."""

SECTIONS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


class Load(NamedTuple):
    """What to send, and how fast. `rate` is in requests a second; `max_concurrency` None: no bound."""

    prompts: list[list[int]]
    output_len: int
    rate: float
    max_concurrency: int | None
    seed: int


class Client(Protocol):
    """What answers a prompt."""

    async def complete(self, prompt: list[int], max_tokens: int) -> Timeline:
        """Stream one answer. What goes wrong with it is in the timeline's `error`."""
        ...


async def send(load: Load, client: Client, advance: Advance) -> tuple[list[Timeline], float]:
    """Send everything; return the timelines in order, and how long it took in seconds.

    A request that waits because `max_concurrency` others are under way is not sent yet.
    """
    found: dict[int, Timeline] = {}
    limiter = anyio.CapacityLimiter(load.max_concurrency) if load.max_concurrency else None
    times = poisson_times(len(load.prompts), load.rate, random.Random(load.seed))

    async def one(index: int, prompt: list[int]) -> None:
        await anyio.sleep(max(0.0, started_s + times[index] - time.perf_counter()))
        async with _slot(limiter):
            found[index] = await client.complete(prompt, load.output_len)
        advance()

    started_s = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for index, prompt in enumerate(load.prompts):
            tasks.start_soon(one, index, prompt)
    return [found[index] for index in range(len(load.prompts))], time.perf_counter() - started_s


@contextlib.asynccontextmanager
async def _slot(limiter: anyio.CapacityLimiter | None) -> AsyncIterator[None]:
    if limiter is None:
        yield
        return
    async with limiter:
        yield


def results(load: Load, timelines: Sequence[Timeline], duration_s: float, objectives_ms: Mapping[str, float]) -> dict[str, Any]:
    """Everything that was found, by the keys of `vllm bench serve`'s JSON."""
    done = [timeline for timeline in timelines if timeline.completed]
    num_input = sum(timeline.num_prompt for timeline in done)
    num_output = sum(timeline.num_output for timeline in done)
    found: dict[str, Any] = {
        "completed": len(done),
        "failed": len(timelines) - len(done),
        "request_rate": "inf" if math.isinf(load.rate) else load.rate,
        "max_concurrency": load.max_concurrency,
        "duration": duration_s,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_cached_tokens": sum(timeline.num_cached for timeline in done),
        "request_throughput": len(done) / duration_s,
        "request_goodput": num_good(timelines, objectives_ms) / duration_s if objectives_ms else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_concurrent_requests": most_at_once(done),
        "errors": sorted({timeline.error for timeline in timelines if timeline.error is not None}),
    }
    for key, values in latencies_ms(timelines).items():
        for name, value in spread(values)._asdict().items():
            found[f"{name}_{key}_ms"] = value
    return found


def most_at_once(timelines: Sequence[Timeline]) -> int:
    """The most requests that were under way at one moment."""
    changes = [(timeline.sent_s, 1) for timeline in timelines] + [(timeline.at_s[-1], -1) for timeline in timelines]
    most = running = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def layout(found: Mapping[str, Any]) -> str:
    """The report as text."""
    lines = [
        " Serving Benchmark Result ".center(WIDTH, "="),
        _line("Successful requests:", found["completed"]),
        _line("Failed requests:", found["failed"]),
    ]
    if found["max_concurrency"] is not None:
        lines.append(_line("Maximum request concurrency:", found["max_concurrency"]))
    if found["request_rate"] != "inf":
        lines.append(_line("Request rate configured (RPS):", float(found["request_rate"])))
    lines += [
        _line("Benchmark duration (s):", found["duration"]),
        _line("Total input tokens:", found["total_input_tokens"]),
        _line("Total generated tokens:", found["total_output_tokens"]),
        _line("Cached input tokens:", found["total_cached_tokens"]),
        _line("Request throughput (req/s):", found["request_throughput"]),
    ]
    if found["request_goodput"] is not None:
        lines.append(_line("Request goodput (req/s):", found["request_goodput"]))
    lines += [
        _line("Output token throughput (tok/s):", found["output_throughput"]),
        _line("Total token throughput (tok/s):", found["total_token_throughput"]),
        _line("Peak concurrent requests:", found["max_concurrent_requests"]),
    ]
    for key, (short, title) in SECTIONS.items():
        lines.append(title.center(WIDTH, "-"))
        for name, shown in (("mean", "Mean"), ("median", "Median"), ("std", "Std"), ("p99", "P99")):
            lines.append(_line(f"{shown} {short} (ms):", found[f"{name}_{key}_ms"]))
    return "\n".join([*lines, "=" * WIDTH])


def _line(name: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {shown:<10}".rstrip()
