"""`repertory bench`: the fixed workloads A to E, the table of three schedulers, and a load for any server.

To add a benchmark: a function here, with its flags as parameters; or in a file of its own, and a line
like that of `serve`.
"""

from __future__ import annotations

import math
import sys
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import anyio
from cyclopts import App, Parameter

from ...protocol.config import EngineConfig, shown
from ...protocol.config_sources import load_config
from ...protocol.errors import ValidationError
from ..observing.logs import configure_logging
from .benching import arrivals, fixed, plot, show, table
from .benching.drive import BenchEngine
from .benching.flags import LOAD, Output, OutputFlags, at_least_one, checked_output
from .benching.serve import serve
from .engine_flags import GROUPS, ConfigFile, engine_flags

_DEFAULTS = {"model": "demo", "log_level": "warning"}
_TABLE_REQUESTS = 160

if TYPE_CHECKING:
    EngineFlags = dict[str, Any]
    TableFlags = dict[str, Any]
else:
    EngineFlags = engine_flags(without=GROUPS["Serving"], defaults=_DEFAULTS)
    # Three of the settings are what is compared, and --seed is the load's own.
    TableFlags = engine_flags(
        without=(*GROUPS["Serving"], "seed", "scheduling_policy", "enable_chunked_prefill"), defaults=_DEFAULTS
    )

bench = App(name="bench", help="Measure this engine, or any OpenAI-compatible server.")


Repetitions = Annotated[int, Parameter(help="how often to run it; the table shows medians", group=LOAD)]
FixedFlags = Annotated[EngineFlags | None, Parameter(name="*")]


@bench.command(sort_key=0)
def offline(
    *, repetitions: Repetitions = 3, output: Output = None, config: ConfigFile = None, engine: FixedFlags = None
) -> int:
    """A: the throughput of 64 requests at once, 256 tokens in, 64 out."""
    return _run_fixed(fixed.OFFLINE, repetitions, output, _settings(engine, config))


@bench.command(sort_key=1)
def latency(
    *, repetitions: Repetitions = 3, output: Output = None, config: ConfigFile = None, engine: FixedFlags = None
) -> int:
    """B: the token rate of one stream alone, 128 tokens in, 128 out."""
    return _run_fixed(fixed.LATENCY, repetitions, output, _settings(engine, config))


@bench.command(sort_key=2)
def prefix(*, repetitions: Repetitions = 3, output: Output = None, config: ConfigFile = None, engine: FixedFlags = None) -> int:
    """C: the throughput of 32 requests that share 1,024 tokens and own 32, 32 out."""
    return _run_fixed(fixed.PREFIX, repetitions, output, _settings(engine, config))


@bench.command(sort_key=3)
def ttft(*, repetitions: Repetitions = 3, output: Output = None, config: ConfigFile = None, engine: FixedFlags = None) -> int:
    """D: the time to the first token of a prompt of 2,048."""
    return _run_fixed(fixed.TTFT, repetitions, output, _settings(engine, config))


@bench.command(sort_key=4)
def itl(*, repetitions: Repetitions = 3, output: Output = None, config: ConfigFile = None, engine: FixedFlags = None) -> int:
    """E: the gaps of 8 streams before and while a prompt of 4,096 tokens is prefilled (see --max-num-batched-tokens)."""
    return _run_fixed(fixed.ITL, repetitions, output, _settings(engine, config))


@bench.command(name="table", sort_key=5)
def compare(
    *,
    num_requests: Annotated[int | None, Parameter(help="requests [default: 160]", group=LOAD)] = None,
    rate: Annotated[
        float | None, Parameter(help="arrivals a second [default: a share of what is measured first]", group=LOAD)
    ] = None,
    static_batch: Annotated[int | None, Parameter(help="size of a static batch [default: --max-num-seqs]", group=LOAD)] = None,
    seed: Annotated[int, Parameter(help="of prompts, lengths and arrivals", group=LOAD)] = 1,
    quick: Annotated[bool, Parameter(help="fewer and shorter requests", negative="", show_default=False, group=LOAD)] = False,
    output: Output = None,
    config: ConfigFile = None,
    engine: Annotated[TableFlags | None, Parameter(name="*")] = None,
) -> int:
    """Static, continuous, and continuous batching with chunked prefill, on the same mixed Poisson arrivals.

    All three have the same limit of running requests, unless --static-batch gives the static one another.
    The one prompt of 4,000 tokens is in every figure but the P99 of TTFT, where it is one in 160; it has a line of
    its own.
    """
    if rate is not None and not 0 < rate < math.inf:
        raise ValidationError(f"--rate must be above 0, got {rate}", field="rate", value=rate)
    count = (table.QUICK_REQUESTS if quick else _TABLE_REQUESTS) if num_requests is None else num_requests
    at_least_one(count, "num_requests")
    if static_batch is not None:
        at_least_one(static_batch, "static_batch")
    plan = table.Plan(count, rate, static_batch, seed, table.QUICK_LENGTHS if quick else arrivals.Lengths())
    settings = _settings(engine, config)
    output = checked_output(output)
    found = anyio.run(partial(table.compare, plan, settings, factory=open_engine, step=_bar))
    _show_table(found, plan, settings, output)
    return 0


bench.command(serve, sort_key=6)


def open_engine(config: EngineConfig) -> AbstractAsyncContextManager[BenchEngine]:
    """An engine that is open inside `async with`."""
    from ..frontends.engine import Engine  # brings the model's libraries with it

    return cast("AbstractAsyncContextManager[BenchEngine]", Engine(config))


def _settings(flags: dict[str, Any] | None, file: Path | None) -> EngineConfig:
    settings = load_config(flags=flags or {}, file=file, defaults=_DEFAULTS)
    configure_logging(settings.log_format, settings.log_level)
    return settings


def _run_fixed(measure: fixed.Measure, repetitions: int, output: OutputFlags | None, settings: EngineConfig) -> int:
    at_least_one(repetitions, "repetitions")
    output = checked_output(output)
    figures, device = anyio.run(_measure, measure, repetitions, settings)
    facts = {"benchmark": measure.key, "model": settings.model, "device": device, "settings": shown(settings)}
    if output.as_json:
        show.write_json({**facts, "figures": show.figures_json(figures)}, sys.stdout)
    else:
        show.write_table(f"{measure.title} ({settings.model}, {device})", show.figures_table(figures), sys.stdout)
    if output.plot is not None:
        plot.draw(output.plot, measure.title, plot.figure_panels(figures))
    return 0


async def _measure(measure: fixed.Measure, repetitions: int, settings: EngineConfig) -> tuple[list[show.Figure], str]:
    with _bar(measure.key, measure.num_requests * repetitions) as advance:
        async with open_engine(settings) as engine:
            return await fixed.repeat(measure, engine, repetitions, advance), engine.capacity.device


def _show_table(found: table.Found, plan: table.Plan, settings: EngineConfig, output: OutputFlags) -> None:
    title = f"{plan.num_requests} requests, {show.number(found.rate)} a second ({settings.model}, {found.device})"
    if output.as_json:
        facts = {"benchmark": "table", "model": settings.model, "device": found.device, "settings": shown(settings)}
        load = {"num_requests": plan.num_requests, "rate": found.rate, "static_batch": plan.static_batch, "seed": plan.seed}
        show.write_json({**facts, **load, "outcomes": found.outcomes, "ratios": table.ratios(found.outcomes)}, sys.stdout)
    else:
        header = ["", *(outcome.name for outcome in found.outcomes)]
        show.write_table(title, show.table(header, table.rows(found.outcomes)), sys.stdout)
        sys.stdout.write(table.ratio_lines(found.outcomes) + "\n")
    if output.plot is not None:
        panels = [
            plot.Panel(name, "ms", {setting: values[key] for setting, values in found.latencies.items()})
            for name, key in (("TTFT", "ttft"), ("TBT", "itl"), ("E2EL", "e2el"))
        ]
        plot.draw(output.plot, title, panels)


def _bar(label: str, total: int) -> show.Bar:
    return show.progress(label, total, sys.stderr)
