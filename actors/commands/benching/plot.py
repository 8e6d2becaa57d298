"""A benchmark as a picture: distributions as cumulative curves, single figures as bars.

matplotlib is wanted only here, and is not among the package's requirements.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ....protocol.errors import ConfigError, ValidationError
from .show import Figure, number


class Panel(NamedTuple):
    """One set of axes: values by name, as a cumulative curve each, or as one bar of medians and ranges."""

    title: str
    unit: str
    series: Mapping[str, Sequence[float]]
    as_bars: bool = False


def check_can_plot(path: Path | None) -> None:
    """Raise `ConfigError` where matplotlib is missing, `ValidationError` for a bad path: before the work, not after it."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise ValidationError(f"--plot: {path} does not end in .png", field="plot", value=str(path))
    if not path.parent.is_dir() or path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValidationError(f"--plot: {path} cannot be written", field="plot", value=str(path))
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'repertory[plot]'", key="plot")


def figure_panels(figures: Sequence[Figure]) -> list[Panel]:
    """A bar for each figure, with the repetitions' range."""
    return [Panel(figure.name, figure.unit, {figure.name: figure.values}, as_bars=True) for figure in figures]


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Write `panels` side by side as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    # No pyplot: it keeps state for the whole process, and may open a window.
    canvas = Canvas(figsize=(max(6.0, 3.6 * len(panels)), 4.2), layout="constrained")
    FigureCanvasAgg(canvas)
    canvas.suptitle(title)
    for axes, panel in zip(canvas.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _bars(axes, panel) if panel.as_bars else _curves(axes, panel)
    canvas.savefig(path, dpi=120)


def _bars(axes: Any, panel: Panel) -> None:
    for index, values in enumerate(panel.series.values()):
        ordered = sorted(value for value in values if value == value)
        if not ordered:
            continue
        middle = statistics.median(ordered)
        axes.bar(index, middle, width=0.5, yerr=[[middle - ordered[0]], [ordered[-1] - middle]], capsize=6)
        axes.annotate(f" {number(middle)}", (index, middle), ha="left", va="bottom")
    axes.set(title=panel.title, ylabel=panel.unit, xlim=(-0.7, len(panel.series) - 0.3), xticks=[])


def _curves(axes: Any, panel: Panel) -> None:
    for name, values in panel.series.items():
        ordered = sorted(values)
        shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
        axes.step(ordered, shares, where="post", label=name)
    largest = max((max(values) for values in panel.series.values() if values), default=0.0)
    least = min((min(values) for values in panel.series.values() if values), default=0.0)
    if least > 0 and largest > 20 * least:
        axes.set_xscale("log")
    axes.set(title=panel.title, xlabel=panel.unit, ylabel="share of all below", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if len(panel.series) > 1:
        axes.legend(loc="lower right", fontsize="small")
