"""Of what the steps were made, over time."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ...observing.runs.binning import Bin
from ...observing.runs.words import duration
from .screen import STYLES, level, plain_table

BAR = 12


def print_steps(bins: list[Bin], num_steps: int, out: Console) -> None:
    """Print one line a bin, bars beside one another."""
    is_plain = out.options.ascii_only
    rates = [(one.num_prefill_tokens / (one.end_s - one.start_s), one.num_decodes / (one.end_s - one.start_s)) for one in bins]
    most_prefill = max(rate for rate, _ in rates) or 1.0
    most_decodes = max(rate for _, rate in rates) or 1.0
    out.print(f"{num_steps:,} steps; the longest bars are {most_prefill:,.0f} prefill and {most_decodes:,.0f} decode tokens/s")
    right = ("from", "steps", "step", "predicted", "idle", "running", "waiting")
    shown = plain_table(
        "from", "prefill", "decode", "steps", "step", "predicted", "idle", "KV held, cached", "running", "waiting", right=right
    )
    for one, (prefill, decodes) in zip(bins, rates, strict=True):
        shown.add_row(
            duration(one.start_s),
            Text(level(prefill / most_prefill, BAR, ascii_only=is_plain), style=STYLES["prefill"]),
            Text(level(decodes / most_decodes, BAR, ascii_only=is_plain), style=STYLES["decode"]),
            f"{one.num_steps:,}",
            _time(one.mean_step_s),
            _time(one.mean_predicted_s),
            f"{one.idle_share:.0%}",
            _memory(one, is_plain),
            _mean(one.num_running),
            _mean(one.num_waiting),
        )
    out.print(shown)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _mean(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _memory(one: Bin, is_plain: bool) -> Text:
    if one.held_share is None or one.cached_share is None:
        return Text("")
    num_held = round(one.held_share * BAR)
    num_cached = min(BAR - num_held, round(one.cached_share * BAR))
    bar = Text(("#" if is_plain else "█") * num_held, style="red")
    bar.append(("+" if is_plain else "▒") * num_cached, style="yellow")
    bar.append(" " * (BAR - num_held - num_cached))
    bar.append(f" {one.held_share:.0%}, {one.cached_share:.0%}")
    return bar
