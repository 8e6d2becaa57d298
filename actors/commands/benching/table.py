"""The seed's table: static, continuous, and continuous batching with chunked prefill, on the same arrivals.

Each setting runs in an engine of its own, one after the other. Requests come at the times of one
Poisson process, whether the engine keeps up or not, and a request's TTFT counts from the time it was
due. The rate is a share of what this machine can serve, measured first: light enough that continuous
batching follows, and more than static batching can.

The size of a static batch is fixed ahead, for the longest answers that may come; so it is a setting
beside the others' limit, as in the seed's table (16 against 64 and 128).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import anyio
import msgspec

from ....protocol.config import EngineConfig
from .arrivals import Lengths, Request, mixed
from .drive import Advance, BenchEngine, EngineFactory, fitted, stream, warm_up
from .metrics import Timeline, latencies_ms, percentile
from .show import Bar, number

LOAD = 0.65
"""The rate of arrivals, as a share of what was measured."""

SAMPLE_EVERY_S = 0.05
LONGEST_GATHER_S = 1.0

CALIBRATION_REQUESTS = 64
CALIBRATION_SEED = 77_000

QUICK_LENGTHS = Lengths(chat=(16, 64), document=(200, 300), book=1000, short_answer=(4, 8), long_answer=(48, 64))
QUICK_REQUESTS = 40


class Setting(NamedTuple):
    """One column: its name, and what it changes in the configuration."""

    name: str
    changes: Mapping[str, Any]


SETTINGS = (
    Setting("static", {"scheduling_policy": "static", "enable_chunked_prefill": False}),
    Setting("continuous", {"scheduling_policy": "fcfs", "enable_chunked_prefill": False}),
    Setting("continuous + chunked", {"scheduling_policy": "fcfs", "enable_chunked_prefill": True}),
)


class Use(msgspec.Struct):
    """What was seen of an engine while it worked, sampled at even times."""

    kv_shares: list[float] = []
    running: list[float] = []


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One setting's figures. `book_ttft_ms` is of the one very long prompt, which the P99 leaves out."""

    name: str
    output_throughput: float
    duration: float
    p50_ttft_ms: float
    p99_ttft_ms: float
    book_ttft_ms: float
    p50_tbt_ms: float
    p99_tbt_ms: float
    mean_kv_share: float
    peak_kv_share: float
    mean_concurrency: float
    peak_concurrency: float
    max_num_seqs: int


class Plan(NamedTuple):
    """What to run. `rate` None: to be measured. `static_batch` None: as many as the others may run."""

    num_requests: int
    rate: float | None
    static_batch: int | None
    seed: int
    lengths: Lengths


class Found(NamedTuple):
    """The table's columns, the rate, and each setting's latencies for a plot."""

    rate: float
    device: str
    outcomes: list[Outcome]
    latencies: dict[str, dict[str, list[float]]]


Step = Callable[[str, int], Bar]
"""Opens a progress bar for what is called so and has so many parts."""


async def compare(plan: Plan, config: EngineConfig, *, factory: EngineFactory, step: Step) -> Found:
    """Run `plan` under every setting. Raises what an engine raises, and the failure of any request."""
    rate = plan.rate
    if rate is None:
        with step("measuring the rate", CALIBRATION_REQUESTS) as advance:
            async with factory(_configured(config, SETTINGS[-1])) as engine:
                rate = LOAD * await capacity_rate(engine, plan.lengths, advance)
    outcomes: list[Outcome] = []
    latencies: dict[str, dict[str, list[float]]] = {}
    device = ""
    for setting in SETTINGS:
        configured = _configured(config, setting, rate=rate, static_batch=plan.static_batch)
        with step(setting.name, plan.num_requests) as advance:
            async with factory(configured) as engine:
                device = engine.capacity.device
                requests = mixed(
                    plan.num_requests, rate, seed=plan.seed, vocab_size=engine.capacity.vocab_size, lengths=plan.lengths
                )
                timelines, use = await replay(engine, requests, advance)
        outcomes.append(outcome(setting.name, timelines, use, limit=configured.running_limit))
        latencies[setting.name] = latencies_ms(timelines)
    return Found(rate, device, outcomes, latencies)


async def capacity_rate(engine: BenchEngine, lengths: Lengths, advance: Advance) -> float:
    """Chats and documents that `engine` ends in a second when it never has to wait for one."""
    await warm_up(engine)
    count = CALIBRATION_REQUESTS
    lengths = lengths._replace(book=lengths.chat[1])
    requests = mixed(count, float("inf"), seed=CALIBRATION_SEED, vocab_size=engine.capacity.vocab_size, lengths=lengths)
    started_s = time.perf_counter()
    ends_s: list[float] = []
    async with anyio.create_task_group() as tasks:
        for request in requests:
            tasks.start_soon(_note_end, engine, request, ends_s, advance)
    # Without the end, where ever fewer run: the rate at which three quarters of them ended.
    most = 3 * count // 4
    return most / (sorted(ends_s)[most - 1] - started_s)


async def _note_end(engine: BenchEngine, request: Request, ends_s: list[float], advance: Advance) -> None:
    prompt = fitted(request.prompt, request.max_tokens, engine.capacity)
    await stream(engine, prompt, request.max_tokens, kind="final_only")
    ends_s.append(time.perf_counter())
    advance()


async def replay(engine: BenchEngine, requests: Sequence[Request], advance: Advance) -> tuple[list[Timeline], Use]:
    """Send each request at its time; return their timelines in order, and what the engine used meanwhile."""
    await warm_up(engine)
    found: dict[int, Timeline] = {}
    use = Use()

    async def one(index: int, request: Request) -> None:
        due_s = started_s + request.at_s
        await anyio.sleep(max(0.0, due_s - time.perf_counter()))
        prompt = fitted(request.prompt, request.max_tokens, engine.capacity)
        found[index] = await stream(engine, prompt, request.max_tokens, sent_s=due_s)
        advance()

    async with anyio.create_task_group() as watching:
        watching.start_soon(_watch, engine, use)
        started_s = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for index, request in enumerate(requests):
                tasks.start_soon(one, index, request)
        watching.cancel_scope.cancel()
    return [found[index] for index in range(len(requests))], use


async def _watch(engine: BenchEngine, use: Use) -> None:
    while True:
        stats = await engine.stats()
        blocks = stats.device_blocks
        use.kv_shares.append(blocks.referenced / blocks.total)
        use.running.append(stats.num_running)
        await anyio.sleep(SAMPLE_EVERY_S)


def outcome(name: str, timelines: Sequence[Timeline], use: Use, *, limit: int) -> Outcome:
    """The figures of one setting. The throughput is that of the whole run, from its start to its last token."""
    found = latencies_ms(timelines)
    seconds = max(timeline.at_s[-1] for timeline in timelines) - min(timeline.sent_s for timeline in timelines)
    book = max(timelines, key=lambda timeline: timeline.num_prompt)
    return Outcome(
        name=name,
        output_throughput=sum(timeline.num_output for timeline in timelines) / seconds,
        duration=seconds,
        p50_ttft_ms=percentile(found["ttft"], 0.5),
        p99_ttft_ms=percentile(found["ttft"], 0.99),
        book_ttft_ms=1e3 * book.ttft_s,
        p50_tbt_ms=percentile(found["itl"], 0.5),
        p99_tbt_ms=percentile(found["itl"], 0.99),
        mean_kv_share=sum(use.kv_shares) / max(1, len(use.kv_shares)),
        peak_kv_share=max(use.kv_shares, default=0.0),
        mean_concurrency=sum(use.running) / max(1, len(use.running)),
        peak_concurrency=max(use.running, default=0.0),
        max_num_seqs=limit,
    )


def ratios(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """What the table is for: each setting over the one before it."""
    static, continuous, chunked = outcomes
    return {
        "throughput_continuous_over_static": continuous.output_throughput / static.output_throughput,
        "throughput_chunked_over_continuous": chunked.output_throughput / continuous.output_throughput,
        "p99_ttft_chunked_over_continuous": chunked.p99_ttft_ms / continuous.p99_ttft_ms,
        "p99_tbt_chunked_over_continuous": chunked.p99_tbt_ms / continuous.p99_tbt_ms,
    }


def ratio_lines(outcomes: Sequence[Outcome]) -> str:
    """The same in sentences."""
    found = ratios(outcomes)
    return (
        f"throughput: continuous / static {found['throughput_continuous_over_static']:.2f}, "
        f"chunked / continuous {found['throughput_chunked_over_continuous']:.2f}\n"
        f"chunked / continuous: TTFT P99 {found['p99_ttft_chunked_over_continuous']:.2f}, "
        f"TBT P99 {found['p99_tbt_chunked_over_continuous']:.2f}"
    )


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The seed's lines, and a few more: a name, then one cell for each outcome."""
    lines: list[tuple[str, Callable[[Outcome], str]]] = [
        ("throughput (tok/s)", lambda found: number(found.output_throughput)),
        ("TTFT P50 (ms)", lambda found: number(found.p50_ttft_ms)),
        ("TTFT P99 (ms)", lambda found: number(found.p99_ttft_ms)),
        ("TTFT of the longest prompt (ms)", lambda found: number(found.book_ttft_ms)),
        ("TBT P50 (ms)", lambda found: number(found.p50_tbt_ms)),
        ("TBT P99 (ms)", lambda found: number(found.p99_tbt_ms)),
        ("KV memory in use, mean / peak", lambda found: f"{found.mean_kv_share:.1%} / {found.peak_kv_share:.1%}"),
        ("concurrency, mean / peak", lambda found: f"{found.mean_concurrency:.1f} / {found.peak_concurrency:.0f}"),
        ("its limit", lambda found: str(found.max_num_seqs)),
        ("duration (s)", lambda found: number(found.duration)),
    ]
    return [[name, *(cell(found) for found in outcomes)] for name, cell in lines]


def _configured(
    config: EngineConfig, setting: Setting, *, rate: float | None = None, static_batch: int | None = None
) -> EngineConfig:
    """`config` under `setting`. A static batch is gathered for as long as one takes to arrive, 1 s at most."""
    changes = dict(setting.changes)
    if setting.name == "static" and rate is not None:
        changes["max_num_seqs"] = min(static_batch or config.running_limit, config.running_limit)
        if not config.scheduling_delay_s:
            changes["scheduling_delay_s"] = min(LONGEST_GATHER_S, changes["max_num_seqs"] / rate)
    return msgspec.structs.replace(config, **changes)
