"""From what drivers answer to a table: metrics, spreads, ratios and whether aims are met. Pure.

A ratio is ours over the peer's, of the same repetition, where both ran within a minute of each other: noise that
lasts longer than that hits both. Its spread is over the repetitions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

OURS = "repertory"
MEMORY = "memory"

Reply = dict[str, Any]
"""What a driver answered; see `driving`."""
Results = dict[str, dict[str, list[Reply]]]
"""Replies by engine and workload, one for each repetition."""


class Spread(NamedTuple):
    """Median, least and most of a few measurements."""

    median: float
    low: float
    high: float


class Metric(NamedTuple):
    """What is read off the replies of a workload. `digits` are those after the point."""

    workload: str
    name: str
    digits: int
    more_is_better: bool
    of: Callable[[Reply], float]


class Aim(NamedTuple):
    """What ours over the peer's should be: at least `bound` where more is better, else at most."""

    workload: str
    metric: str
    peer: str
    bound: float
    stretch: float | None = None


class FloorAim(NamedTuple):
    """The same for what is compared with the machine, or with nothing."""

    name: str
    values: list[float]
    digits: int
    bound: float | None = None
    more_is_better: bool = False


# ---- one reply ----------------------------------------------------------------------------------


def output_rate(reply: Reply) -> float:
    """Output tokens a second, from the first submission to the last token."""
    return float(sum(count for arrivals in reply["arrivals"] for _, count in arrivals) / reply["seconds"])


def decode_rate(reply: Reply) -> float:
    """Tokens a second of a single stream, after its first output."""
    arrivals = reply["arrivals"][0]
    return float(sum(count for _, count in arrivals[1:]) / (arrivals[-1][0] - arrivals[0][0]))


def first_token(reply: Reply) -> float:
    """Seconds to the first output of a single stream."""
    return float(reply["arrivals"][0][0][0])


def prefill_rate(reply: Reply) -> float:
    """Prompt tokens a second of a single stream, up to its first output."""
    return float(reply["prompt_tokens"] / first_token(reply))


def gaps_before(reply: Reply) -> list[float]:
    """Seconds between outputs of a stream while all streams decode and nothing else happens."""
    all_decode = max(arrivals[0][0] for arrivals in reply["arrivals"])
    return [after - before for before, after in _pairs(reply) if before >= all_decode and after <= reply["arrived_s"]]


def gaps_during(reply: Reply) -> list[float]:
    """Seconds between outputs of a stream that overlap the prefill of the long prompt."""
    start, end = reply["arrived_s"], reply["answered_s"]
    return [after - before for before, after in _pairs(reply) if after > start and before < end]


def _pairs(reply: Reply) -> list[tuple[float, float]]:
    times = [[moment for moment, _ in arrivals] for arrivals in reply["arrivals"]]
    return [pair for stream in times for pair in pairwise(stream)]


METRICS = (
    Metric("A", "output tok/s", 1, True, output_rate),
    Metric("B", "tok/s", 1, True, decode_rate),
    Metric("C", "output tok/s", 1, True, output_rate),
    Metric("D", "TTFT s", 3, False, first_token),
    Metric("E", "gap before ms", 1, False, lambda reply: 1e3 * statistics.median(gaps_before(reply))),
    Metric("E", "gap P50 ms", 1, False, lambda reply: 1e3 * statistics.median(gaps_during(reply))),
    Metric("E", "gap max ms", 1, False, lambda reply: 1e3 * max(gaps_during(reply))),
    Metric("E", "long TTFT s", 3, False, lambda reply: float(reply["answered_s"] - reply["arrived_s"])),
)

AIMS = (
    Aim("A", "output tok/s", "vllm", 1.25, 1.35),
    Aim("B", "tok/s", "vllm", 1.5),
    Aim("B", "tok/s", "llamacpp", 1.45),
    Aim("C", "output tok/s", "vllm", 1.5, 1.65),
    Aim("D", "TTFT s", "vllm", 0.75),
    Aim("E", "gap before ms", "vllm", 0.65),
    Aim("E", "gap P50 ms", "vllm", 0.75),
    Aim("E", "gap max ms", "vllm", 0.85),
    Aim("E", "long TTFT s", "vllm", 0.8),
)


# ---- all replies --------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> Spread:
    """Of one measurement or more."""
    return Spread(statistics.median(values), min(values), max(values))


def ratios(metric: Metric, ours: Sequence[Reply], theirs: Sequence[Reply]) -> list[float]:
    """Ours over theirs, of each repetition that both have."""
    return [metric.of(our) / metric.of(their) for our, their in zip(ours, theirs, strict=False)]


def verdict(value: float, bound: float, *, more_is_better: bool, stretch: float | None = None) -> str:
    """What was aimed at and whether it was reached, in words."""
    side = "at least" if more_is_better else "at most"
    also = "" if stretch is None else f" (stretch {stretch:g})"
    met = _reaches(value, bound, more_is_better=more_is_better)
    stretched = stretch is not None and _reaches(value, stretch, more_is_better=more_is_better)
    return f"{side} {bound:g}{also}: {'met, stretch too' if met and stretched else 'met' if met else 'missed'}"


def _reaches(value: float, bound: float, *, more_is_better: bool) -> bool:
    return value >= bound if more_is_better else value <= bound


def comparison_rows(results: Results) -> list[list[str]]:
    """A row for each metric and engine: workload, metric, engine, spread, ratio, aim. Ours comes first."""
    rows = []
    for metric in METRICS:
        engines = [engine for engine in results if results[engine].get(metric.workload)]
        better = "more" if metric.more_is_better else "less"
        for engine in sorted(engines, key=lambda engine: engine != OURS):
            replies = results[engine][metric.workload]
            row = [metric.workload, f"{metric.name} ({better} is better)", engine]
            row.append(shown(spread([metric.of(reply) for reply in replies]), metric.digits))
            rows.append([*row, *_compared(metric, engine, results)])
    return rows


def _compared(metric: Metric, engine: str, results: Results) -> list[str]:
    ours = results.get(OURS, {}).get(metric.workload, [])
    values = [] if engine == OURS else ratios(metric, ours, results[engine][metric.workload])
    if not values:
        return ["", ""]
    ratio = spread(values)
    found = [aim for aim in AIMS if (aim.workload, aim.metric, aim.peer) == (metric.workload, metric.name, engine)]
    words = [verdict(ratio.median, aim.bound, more_is_better=metric.more_is_better, stretch=aim.stretch) for aim in found]
    return [f"{shown(ratio, 2)} x", *(words or [""])]


def floors(results: Results, weight_bytes: int) -> list[FloorAim]:
    """What our engine is held against besides peers. `weight_bytes`: what a step for one sequence reads."""
    ours, memory = results.get(OURS, {}), results.get(MEMORY, {}).get("memory", [])
    found = []
    if memory:
        speeds = [float(reply["gb_per_s"]) for reply in memory]
        least_ms = [weight_bytes / (speed * 1e9) * 1e3 for speed in speeds]
        found.append(FloorAim("memory read GB/s", speeds, 2))
        found.append(FloorAim("weight bytes / read ms", least_ms, 1))
        if ours.get("B"):
            steps_ms = [1e3 / decode_rate(reply) for reply in ours["B"]]
            found.append(FloorAim("B=1 step ms", steps_ms, 1))
            # The bandwidth of the whole run: it was not measured in the same seconds.
            least = statistics.median(least_ms)
            found.append(FloorAim("B=1 step / (weight bytes / read)", [step / least for step in steps_ms], 2, 1.4))
    for workload, bound in (("P", 3500.0), ("D", 2700.0)):
        if replies := ours.get(workload):
            name = f"prefill tok/s at {replies[0]['prompt_tokens']}"
            found.append(FloorAim(name, [prefill_rate(reply) for reply in replies], 0, bound, more_is_better=True))
    return found


def floor_rows(found: Sequence[FloorAim]) -> list[list[str]]:
    """A row for each: name, spread, aim."""
    rows = []
    for floor in found:
        of = spread(floor.values)
        words = "" if floor.bound is None else verdict(of.median, floor.bound, more_is_better=floor.more_is_better)
        rows.append([floor.name, shown(of, floor.digits), words])
    return rows


def shown(value: Spread, digits: int) -> str:
    """`median [least..most]`."""
    return f"{value.median:.{digits}f} [{value.low:.{digits}f}..{value.high:.{digits}f}]"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)
