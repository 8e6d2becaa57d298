"""Simulated runs as a picture: KV use, queue and what steps are made of, over time, a column for each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...simulation.whatif import Moment, Outcome

MOST_POINTS = 600
"""On a curve; what lies between two of them is averaged."""


def draw(path: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """Write the timelines of `outcomes` as a PNG. Wants matplotlib (`check_can_plot`)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    # No pyplot: it keeps state for the whole process, and may open a window.
    canvas = Canvas(figsize=(max(7.0, 5.0 * len(outcomes)), 8.0), layout="constrained")
    FigureCanvasAgg(canvas)
    canvas.suptitle(title)
    grid = canvas.subplots(3, len(outcomes), squeeze=False, sharex=True, sharey="row")
    for column, outcome in enumerate(outcomes):
        at_s = binned(outcome.moments, lambda moment: moment.at)
        _kv(grid[0][column], at_s, outcome)
        _queue(grid[1][column], at_s, outcome)
        _steps(grid[2][column], at_s, outcome)
    canvas.savefig(path, dpi=110)


def binned(moments: Sequence[Moment], of: Callable[[Moment], float]) -> list[float]:
    """`of` each moment, or means of equally many neighbours where there are more than `MOST_POINTS`."""
    size = max(1, -(-len(moments) // MOST_POINTS))
    values = [of(moment) for moment in moments]
    return [sum(values[start : start + size]) / len(values[start : start + size]) for start in range(0, len(values), size)]


def _kv(axes: Any, at_s: Sequence[float], outcome: Outcome) -> None:
    held = binned(outcome.moments, lambda moment: 100 * moment.kv_share)
    cached = binned(outcome.moments, lambda moment: 100 * moment.cached_share)
    axes.stackplot(at_s, held, cached, labels=["held by requests", "cache"], alpha=0.8)
    axes.set(title=outcome.name, ylabel="KV blocks, %", ylim=(0, 100))
    axes.legend(loc="upper left", fontsize="small")


def _queue(axes: Any, at_s: Sequence[float], outcome: Outcome) -> None:
    axes.plot(at_s, binned(outcome.moments, lambda moment: moment.num_running), label="running", linewidth=1.0)
    axes.plot(at_s, binned(outcome.moments, lambda moment: moment.num_waiting), label="waiting", linewidth=1.0)
    axes.set(ylabel="requests", ylim=(0, None))
    axes.legend(loc="upper left", fontsize="small")


def _steps(axes: Any, at_s: Sequence[float], outcome: Outcome) -> None:
    decodes = binned(outcome.moments, lambda moment: moment.num_decodes)
    prefill = binned(outcome.moments, lambda moment: moment.num_prefill_tokens)
    axes.stackplot(at_s, decodes, prefill, labels=["decodes", "prefill"], alpha=0.8)
    axes.set(ylabel="tokens a step", xlabel="seconds")
    axes.legend(loc="upper left", fontsize="small")
