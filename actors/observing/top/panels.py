"""The parts of the screen: functions from a view and its rates to what the terminal shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ....protocol.ids import show_request_id
from ....protocol.outputs import BlockCounts
from ....protocol.view import CompanyView
from .rates import ActorRate, Rates

HELD, CACHED, FREE = "#3fb68b", "#4a7fb5", "#3a3f4b"
QUIET, WARM, HOT = "#3fb68b", "#e0af50", "#e06c60"
BAR = 30
STAGE_COLOURS = {
    "decode": "#3fb68b",
    "prefill": "#56b6c2",
    "fetch": "#4a7fb5",
    "queue": "#9aa3b2",
    "blocks": "#9aa3b2",
    "preempted": "#e0af50",
    "paused": "#c678dd",
    "restart": "#e06c60",
}


def headline(view: CompanyView, rates: Rates) -> Text:
    """Who it is, and the figures that matter most."""
    text = Text()
    text.append(f" {view.model_name.rstrip('/').rpartition('/')[2]} ", style="bold reverse")
    text.append(f"  {view.device}", style="dim")
    text.append(f"   {rates.generated_tokens:,.0f}", style="bold #3fb68b")
    text.append(" tok/s out", style="dim")
    text.append(f"   {rates.prompt_tokens:,.0f}", style="bold #56b6c2")
    text.append(" tok/s in", style="dim")
    text.append(f"   {rates.finished:.1f}", style="bold")
    text.append(" requests/s", style="dim")
    text.append(f"   {_milliseconds(rates.step_s)}", style="bold")
    text.append(" a step", style="dim")
    text.append(f"   {view.num_frontends}", style="bold")
    text.append(" frontends" if view.num_frontends != 1 else " frontend", style="dim")
    if view.stats.num_restarts:
        text.append(f"   device restarted {view.stats.num_restarts} times", style=HOT)
    return text


def queues(view: CompanyView) -> Group:
    """Who is where."""
    stats = view.stats
    table = _table(("", "left"), ("", "right"), ("", "left"))
    rows = [
        ("running", stats.num_running, HELD),
        ("waiting", stats.num_waiting, STAGE_COLOURS["queue"]),
        ("preempted", stats.num_preempted, STAGE_COLOURS["preempted"]),
        ("paused", stats.num_paused, STAGE_COLOURS["paused"]),
        ("fetching", stats.num_fetching, STAGE_COLOURS["fetch"]),
    ]
    scale = max(view.running_limit, *(number for _, number, _ in rows))
    for name, number, colour in rows:
        shown = f"{number} of {view.running_limit}" if name == "running" else str(number)
        table.add_row(name, Text(shown, style="bold" if number else "dim"), _bar([(number, colour)], scale, width=24))
    swaps, recomputes = stats.num_preemptions.get("swap", 0), stats.num_preemptions.get("recompute", 0)
    return Group(table, Text(f"preempted so far: {swaps} swapped, {recomputes} recomputed", style="dim"))


def memory(view: CompanyView, rates: Rates) -> Table:
    """Both tiers as bars, and what the cache is worth."""
    table = _table(("", "left"), ("", "left"), ("", "right"))
    for name, blocks in (("device", view.stats.device_blocks), ("host", view.stats.host_blocks)):
        if not blocks.total:
            table.add_row(name, Text("no blocks", style="dim"), "")
            continue
        parts = [(blocks.referenced, HELD), (blocks.cached, CACHED)]
        table.add_row(name, _bar(parts, blocks.total), f"{blocks.referenced / blocks.total:.0%} held")
        table.add_row("", _tokens_of(blocks, view.block_size), "")
    hits = "-" if rates.hit_rate is None else f"{rates.hit_rate:.0%}"
    total = view.stats.prefix_cache_queries
    overall = f"{view.stats.prefix_cache_hits / total:.0%}" if total else "-"
    table.add_row("hits", Text.assemble((hits, "bold"), (f" of prompt tokens now, {overall} since the start", "dim")), "")
    moved = f"{_size(view.stats.swap_out_bytes)} copied out, {_size(view.stats.swap_in_bytes)} in"
    table.add_row("copies", Text(moved, style="dim"), "")
    return table


def _tokens_of(blocks: BlockCounts, block_size: int) -> Text:
    text = Text()
    for number, name, colour in (
        (blocks.referenced, "held", HELD),
        (blocks.cached, "cached", CACHED),
        (blocks.free, "free", FREE),
    ):
        text.append("■ ", style=colour)
        text.append(f"{number * block_size:,} {name}  ", style="dim")
    return text.append("tokens", style="dim")


def actors(view: CompanyView, rates: Rates) -> Table:
    """Who has mail, and who is busy: an actor that is near 100% holds everybody up."""
    table = _table(("actor", "left"), ("process", "left"), ("inbox", "right"), ("msg/s", "right"), ("busy", "left"))
    for load in view.actors:
        rate = rates.actors.get((load.name, load.process), ActorRate(0.0, 0.0))
        colour = QUIET if rate.busy < 0.5 else WARM if rate.busy < 0.8 else HOT
        busy = _bar([(rate.busy if rate.busy >= 0.01 else 0.0, colour)], 1.0, width=10)
        busy.append(f" {rate.busy:>4.0%}", style="bold" if rate.busy >= 0.01 else "dim")
        depth = Text(str(load.depth), style="dim" if not load.depth else WARM if load.depth < 100 else HOT)
        restarts = Text(f" ↻{load.num_restarts}", style=HOT) if load.num_restarts else Text()
        table.add_row(
            Text(load.name) + restarts,
            Text(load.process.removeprefix("frontend-"), style="dim"),
            depth,
            f"{rate.messages:,.0f}",
            busy,
        )
    return table


def prefixes(view: CompanyView) -> Table:
    """What requests share."""
    table = _table(("tokens", "right"), ("held by", "right"), ("goes on in", "right"), ("on the device", "left"))
    for prefix in view.prefixes:
        on_host = prefix.num_host_tokens
        where = _bar([(prefix.num_device_tokens, HELD)], prefix.num_tokens, width=12)
        where.append(f"  {on_host:,} tokens on the host too" if on_host else "", style="dim")
        table.add_row(f"{prefix.num_tokens:,}", str(prefix.num_holders), f"{prefix.num_branches} ways", where)
    if not view.prefixes:
        table.add_row(Text("nothing is shared", style="dim"), "", "", "")
    return table


def slowest(view: CompanyView) -> Table:
    """Who has been here for the longest, and what each does now."""
    table = _table(("request", "left"), ("age", "right"), ("now", "left"), ("prompt", "right"), ("output", "right"))
    for one in view.slowest:
        shown = show_request_id(one.request_id)
        name = Text(shown if one.label == shown else one.label, no_wrap=True, overflow="ellipsis")
        stage = Text(one.stage, style=STAGE_COLOURS.get(one.stage, ""))
        table.add_row(name, _age(one.age_s), stage, f"{one.num_prompt_tokens:,}", f"{one.num_output_tokens:,}")
    if not view.slowest:
        table.add_row(Text("nobody is here", style="dim"), "", "", "", "")
    return table


# ---- pieces -------------------------------------------------------------------------------------


def _table(*columns: tuple[str, str]) -> Table:
    has_header = any(name for name, _ in columns)
    table = Table(box=None, expand=False, show_header=has_header, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True, overflow="ellipsis")
    return table


def _bar(parts: Sequence[tuple[float, str]], total: float, width: int = BAR) -> Text:
    """Coloured shares of `total`; what is there at all has a cell at least."""
    text, left = Text(), width
    for number, colour in parts:
        cells = min(left, max(1, round(number / total * width))) if number > 0 and total > 0 else 0
        text.append("█" * cells, style=colour)
        left -= cells
    return text.append("━" * left, style=FREE)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _age(seconds: float) -> Text:
    shown = f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60):02} s"
    return Text(shown, style="" if seconds < 10 else WARM if seconds < 60 else HOT)


def _size(number: float) -> str:
    for prefix in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.0f} B" if not prefix else f"{number:.1f} {prefix}B"
        number /= 1000
    return f"{number:.1f} TB"
