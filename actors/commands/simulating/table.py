"""Simulated runs side by side: a table for people, the same figures for machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from ...simulation.whatif import Moment, Outcome
from ..benching.metrics import Timeline, latencies_ms, num_good, percentile
from ..benching.show import number

OBJECTIVES = ("ttft", "tpot", "itl", "e2el")
"""What `--goodput` can bound. The ITL of a request is the 99th percentile of its gaps."""


class Figures(msgspec.Struct, kw_only=True):
    """One run in numbers. Latencies in milliseconds, shares from 0 to 1; throughput counts from first arrival to last token."""

    name: str
    num_completed: int
    num_refused: int
    duration_s: float
    output_throughput: float
    total_throughput: float
    request_throughput: float
    goodput: float | None
    good_share: float | None
    p50_ttft_ms: float
    p99_ttft_ms: float
    p50_itl_ms: float
    p99_itl_ms: float
    p50_e2el_ms: float
    p99_e2el_ms: float
    hit_rate: float
    num_preemptions: Mapping[str, int]
    swap_bytes: int
    mean_kv_share: float
    peak_kv_share: float
    mean_running: float
    peak_running: float
    mean_waiting: float
    peak_waiting: float
    busy_share: float
    num_steps: int


def figures(outcome: Outcome, objectives_ms: Mapping[str, float]) -> Figures:
    """What a run came to. A request with several sequences counts as so many here."""
    timelines = [
        Timeline(sent_s=one.arrival_s, num_prompt=one.num_prompt_tokens, at_s=one.at_s, num_output=len(one.at_s))
        for one in outcome.seen
    ]
    found = latencies_ms(timelines)
    seconds = outcome.duration_s or 1.0
    num_output = sum(timeline.num_output for timeline in timelines)
    num_prompt = sum(timeline.num_prompt for timeline in timelines)
    good = num_good(timelines, objectives_ms) if objectives_ms else None
    moments = outcome.moments
    return Figures(
        name=outcome.name,
        num_completed=len(timelines),
        num_refused=outcome.num_refused,
        duration_s=outcome.duration_s,
        output_throughput=num_output / seconds,
        total_throughput=(num_prompt + num_output) / seconds,
        request_throughput=len(timelines) / seconds,
        goodput=None if good is None else good / seconds,
        good_share=None if good is None else good / max(1, len(timelines) + outcome.num_refused),
        p50_ttft_ms=percentile(found["ttft"], 0.5),
        p99_ttft_ms=percentile(found["ttft"], 0.99),
        p50_itl_ms=percentile(found["itl"], 0.5),
        p99_itl_ms=percentile(found["itl"], 0.99),
        p50_e2el_ms=percentile(found["e2el"], 0.5),
        p99_e2el_ms=percentile(found["e2el"], 0.99),
        hit_rate=outcome.num_hit_tokens / max(1, outcome.num_queried_tokens),
        num_preemptions=outcome.num_preemptions,
        swap_bytes=outcome.swap_bytes,
        mean_kv_share=_mean(moments, lambda moment: moment.kv_share),
        peak_kv_share=max((moment.kv_share for moment in moments), default=0.0),
        mean_running=_mean(moments, lambda moment: moment.num_running),
        peak_running=max((moment.num_running for moment in moments), default=0),
        mean_waiting=_mean(moments, lambda moment: moment.num_waiting),
        peak_waiting=max((moment.num_waiting for moment in moments), default=0),
        busy_share=outcome.busy_s / seconds,
        num_steps=outcome.num_steps,
    )


def rows(runs: Sequence[Figures]) -> list[list[str]]:
    """A name, then one cell for each run."""
    lines: list[tuple[str, Callable[[Figures], str]]] = [
        ("completed / refused", lambda run: f"{run.num_completed:,} / {run.num_refused:,}"),
        ("duration (s)", lambda run: number(run.duration_s)),
        ("output throughput (tok/s)", lambda run: number(run.output_throughput)),
        ("total throughput (tok/s)", lambda run: number(run.total_throughput)),
        ("requests (1/s)", lambda run: number(run.request_throughput)),
        ("TTFT P50 / P99 (ms)", lambda run: f"{number(run.p50_ttft_ms)} / {number(run.p99_ttft_ms)}"),
        ("ITL P50 / P99 (ms)", lambda run: f"{number(run.p50_itl_ms)} / {number(run.p99_itl_ms)}"),
        ("E2EL P50 / P99 (ms)", lambda run: f"{number(run.p50_e2el_ms)} / {number(run.p99_e2el_ms)}"),
        ("prefix hit rate", lambda run: f"{run.hit_rate:.1%}"),
        ("preemptions, recompute / swap", _preemptions),
        ("KV in use, mean / peak", lambda run: f"{run.mean_kv_share:.1%} / {run.peak_kv_share:.1%}"),
        ("running, mean / peak", lambda run: f"{run.mean_running:.1f} / {run.peak_running:.0f}"),
        ("waiting, mean / peak", lambda run: f"{run.mean_waiting:.1f} / {run.peak_waiting:.0f}"),
        ("device busy", lambda run: f"{run.busy_share:.1%}"),
        ("steps", lambda run: f"{run.num_steps:,}"),
    ]
    if any(run.goodput is not None for run in runs):
        lines.insert(5, ("goodput (1/s), share", lambda run: f"{number(run.goodput or 0.0)}, {run.good_share or 0.0:.1%}"))
    if any(run.swap_bytes for run in runs):
        lines.append(("moved between tiers (GB)", lambda run: number(run.swap_bytes / 1e9)))
    return [[name, *(cell(run) for run in runs)] for name, cell in lines]


def as_json(runs: Sequence[Figures]) -> list[dict[str, Any]]:
    """The runs as mappings."""
    return [msgspec.to_builtins(run) for run in runs]


def _preemptions(run: Figures) -> str:
    return f"{run.num_preemptions.get('recompute', 0)} / {run.num_preemptions.get('swap', 0)}"


def _mean(moments: Sequence[Moment], of: Callable[[Moment], float]) -> float:
    """Over time: each moment counts until the next."""
    spans = [later.at - sooner.at for sooner, later in pairwise(moments)]
    total = sum(spans)
    if not total:
        return of(moments[0]) if moments else 0.0
    return sum(span * of(moment) for span, moment in zip(spans, moments, strict=False)) / total
