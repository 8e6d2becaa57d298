"""`repertory simulate`: a recorded run again, or what another policy or configuration would have made of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter

from ...protocol.config import FIELDS, shown
from ...protocol.config_sources import typed
from ...protocol.errors import ValidationError
from ...protocol.trace import Finished
from ...protocol.trace_reading import Trace
from ..simulation.formats import mooncake_lines
from ..simulation.replay import Difference, Replay
from ..simulation.whatif import Outcome, WhatIfRun
from .benching import show
from .benching.flags import Output, OutputFlags, checked_output
from .benching.metrics import parse_objectives
from .engine_flags import GROUPS, ConfigFile, engine_flags
from .simulating import picture, table
from .simulating.sources import (
    DEVICE,
    DEVICE_DEFAULTS,
    GENERATE,
    DeviceFlags,
    GenerateFlags,
    Source,
    loaded,
    of_trace,
    of_workload,
    own_trace,
    variant,
)

_LEFT_OUT = (
    *GROUPS["Device"],
    *GROUPS["Supervision"],
    *GROUPS["Serving"],
    *GROUPS["Observing"],
    *(key for key in GROUPS["Model"] if key != "max_model_len"),
    "cpu_kv_cache_bytes",
    "gpu_memory_utilization",
    "scheduling_policy",
)
_SETTINGS = (set(FIELDS) - set(_LEFT_OUT)) | {"scheduling_policy"}
"""What `--also` may change."""

if TYPE_CHECKING:
    EngineFlags = dict[str, Any]
else:
    EngineFlags = engine_flags(without=_LEFT_OUT, defaults=DEVICE_DEFAULTS)

COMPARE = Group("What to compare", sort_key=0)


HELP = """Replay a recorded run, or simulate requests under any policy and
configuration, without a device.

A trace that --trace-file has written, alone, is replayed: the same inputs at
the same times, every decision held against the recorded one. The first that
differs is shown, and the exit status is 1.

With a policy, a setting or anything else to change, the trace's requests meet
a simulated device. How long its steps and copies take is fitted from the
trace, or given by flags; the first column is what was recorded. Public traces
and made-up requests have no recorded run: their device is a large GPU with an
8B model, unless flags say otherwise.

  repertory simulate run.jsonl
  repertory simulate run.jsonl --policy fcfs --policy static --plot run.png
  repertory simulate mooncake.jsonl --goodput ttft:2000 itl:50 \\
      --also max-num-batched-tokens=512
  repertory simulate --generate chats --rate 2 --requests 500 \\
      --also enable-prefix-caching=false
"""

simulate = App(name="simulate", help_prologue=HELP, help_format="plaintext")


@simulate.default
def run_simulation(
    file: Annotated[Path | None, Parameter(help="a trace: repertory's own, Mooncake's, BurstGPT's or Azure's")] = None,
    *,
    format: Annotated[
        str | None, Parameter(help="repertory, mooncake, burstgpt or azure [default: what the file looks like]")
    ] = None,
    policy: Annotated[
        list[str] | None, Parameter(help="a scheduling policy; several: a column for each", group=COMPARE, negative="")
    ] = None,
    also: Annotated[
        list[str] | None,
        Parameter(help="another column: the first with KEY=VALUE[,KEY=VALUE...] changed", group=COMPARE, negative=""),
    ] = None,
    load: Annotated[float, Parameter(help="requests come this many times as fast", group=COMPARE)] = 1.0,
    goodput: Annotated[
        list[str] | None,
        Parameter(
            help="objectives a request has to meet, NAME:MILLISECONDS of ttft, tpot, itl, e2el",
            group=COMPARE,
            negative="",
            consume_multiple=True,
        ),
    ] = None,
    write: Annotated[Path | None, Parameter(help="write the requests as a trace in Mooncake's format, and stop")] = None,
    generate: Annotated[GenerateFlags | None, Parameter(name="*", group=GENERATE)] = None,
    device: Annotated[DeviceFlags | None, Parameter(name="*", group=DEVICE)] = None,
    output: Output = None,
    config: ConfigFile = None,
    engine: Annotated[EngineFlags | None, Parameter(name="*")] = None,
) -> int:
    """Replay a trace, or simulate its requests under other policies and settings."""
    began, began_cpu = time.perf_counter(), time.process_time()
    generate, device, output = generate or GenerateFlags(), device or DeviceFlags(), checked_output(output)
    settings = dict(engine or {})
    _check(file, generate, load)
    objectives = parse_objectives(goodput or [], table.OBJECTIVES)
    trace = own_trace(file, format) if file is not None else None
    changes = (policy, also, settings, goodput, write, output.plot, device != DeviceFlags(), load != 1.0, config)
    if file is not None and trace is not None and not any(changes):
        return _replay(file, trace, output)
    if file is not None and trace is not None:
        source = of_trace(file, trace, settings, config, device, load=load)
    else:
        found = loaded(file, format, generate)
        source = of_workload(str(file or found.format), found, settings, config, device, load=load)
    if not source.jobs:
        raise ValidationError(f"{source.name}: there are no requests in it", field="trace")
    if write is not None:
        return _write(write, source)
    variants = list(_variants(policy or [source.config.scheduling_policy], also or []))
    outcomes = [_run(source, name, changed) for name, changed in variants]
    _show(source, outcomes, objectives, output, (time.perf_counter() - began, time.process_time() - began_cpu))
    return 0


def _check(file: Path | None, generate: GenerateFlags, load: float) -> None:
    if (file is None) == (generate.generate is None):
        raise ValidationError("give a trace, or --generate and what to generate: one of the two", field="file")
    if not 0 < load < float("inf"):
        raise ValidationError(f"--load must be above 0, got {load}", field="load", value=load)


# ---- the same again -------------------------------------------------------------------------------


def _replay(file: Path, trace: Trace, output: OutputFlags) -> int:
    began = time.perf_counter()
    replay = Replay(trace)
    with show.progress("replay", len(trace.records), sys.stderr) as advance:
        replayed = replay.run(advance)
    seconds = time.perf_counter() - began
    spans = [record.at for record in trace.records if hasattr(record, "at")]
    recorded_s = max(spans, default=trace.began.at) - trace.began.at
    if output.as_json:
        show.write_json(
            {
                "trace": str(file),
                "same": replayed.is_same,
                "num_requests": replayed.num_requests,
                "num_steps": replayed.num_steps,
                "digest": replayed.digest,
                "recorded_digest": replayed.recorded_digest,
                "difference": replayed.difference._asdict() if replayed.difference else None,
                "recorded_s": recorded_s,
                "replayed_s": seconds,
            },
            sys.stdout,
        )
        return 0 if replayed.is_same else 1
    out = sys.stdout.write
    out(f"{file}: {recorded_s:.1f} s of repertory {trace.began.engine}, settings {shown(replay.core.config)}\n")
    if not isinstance(trace.records[-1] if trace.records else None, Finished):
        out("the trace has no end: the run was cut off. What its last requests said is not known, and may matter\n")
    if replayed.difference is not None:
        out(_differences(replayed.difference))
    elif not replayed.is_same:
        out(f"every step is the same, but not all that was reported: digest {replayed.digest[:16]}\n")
    else:
        out(f"the same decisions in all {replayed.num_steps:,} steps of {replayed.num_requests:,} requests, ")
        out(f"digest {replayed.digest[:16]}\n")
    out(f"replayed in {seconds:.2f} s, {recorded_s / seconds:,.0f} times as fast as it was\n")
    return 0 if replayed.is_same else 1


def _differences(found: Difference) -> str:
    lines = [f"the first different decision: step {found.step_id} at {found.at:.6f} s\n"]
    lines += [f"  {name}: recorded {recorded}, replayed {replayed}\n" for name, recorded, replayed in found.fields]
    return "".join(lines)


# ---- otherwise ------------------------------------------------------------------------------------


def _variants(policies: Sequence[str], also: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and changed settings of each column: each policy, then the first one with each of `also`."""
    for policy in policies:
        yield policy, {"scheduling_policy": policy}
    for words in also:
        yield words, {"scheduling_policy": policies[0], **dict(map(_setting, words.split(",")))}


def _setting(words: str) -> tuple[str, Any]:
    name, is_given, text = words.partition("=")
    key = name.strip().removeprefix("--").replace("-", "_")
    if not is_given or key not in _SETTINGS:
        known = ", ".join(sorted(_SETTINGS))
        raise ValidationError(f"--also: {words!r} is not SETTING=VALUE; settings are {known}", field="also", value=words)
    return key, typed(key, text.strip(), source=f"--also {name.strip()}")


def _run(source: Source, name: str, settings: Mapping[str, Any]) -> Outcome:
    config, capacity = variant(source, settings)
    with show.progress(name, len(source.jobs), sys.stderr) as advance:
        return WhatIfRun(config, capacity, source.latency, source.jobs, on_end=advance).serve(name)


def _write(path: Path, source: Source) -> int:
    with show.progress("writing", len(source.jobs), sys.stderr) as advance:
        lines = []
        for line in mooncake_lines(source.jobs):
            lines.append(line)
            advance()
    try:
        path.write_bytes(b"".join(lines))
    except OSError as error:
        raise ValidationError(f"--write: {path}: {error.strerror or error}", field="write", value=str(path)) from None
    sys.stdout.write(f"{path}: {len(lines):,} requests, {sum(map(len, lines)):,} bytes\n")
    return 0


def _show(
    source: Source,
    outcomes: list[Outcome],
    objectives: Mapping[str, float],
    output: OutputFlags,
    spent_s: tuple[float, float],
) -> None:
    seconds, cpu_s = spent_s
    simulated_s = sum(outcome.duration_s for outcome in outcomes)
    columns = [*([source.measured] if source.measured is not None else []), *outcomes]
    runs = [table.figures(outcome, objectives) for outcome in columns]
    left_out = f", {source.num_left_out:,} left out" if source.num_left_out else ""
    title = f"{source.name}: {len(source.jobs):,} requests{left_out}"
    if output.as_json:
        facts = {"source": source.name, "num_requests": len(source.jobs), "num_left_out": source.num_left_out}
        speed = {"simulated_s": simulated_s, "seconds": seconds, "cpu_s": cpu_s, "settings": shown(source.config)}
        fitted = None if source.fit is None else source.fit._asdict()
        latency = {name: getattr(source.latency, name) for name in source.latency.__struct_fields__}
        show.write_json(
            {**facts, **speed, "latency": latency, "fit": fitted, "goodput_ms": objectives, "runs": table.as_json(runs)},
            sys.stdout,
        )
    else:
        show.write_table(title, show.table(["", *(run.name for run in runs)], table.rows(runs)), sys.stdout)
        sys.stdout.write(_device_line(source))
        words = f"simulated {simulated_s:,.0f} s in {seconds:.1f} s ({cpu_s:.1f} s of CPU)"
        sys.stdout.write(f"{words}: {simulated_s / seconds:,.0f} times as fast\n")
    if output.plot is not None:
        picture.draw(output.plot, title, columns)


def _device_line(source: Source) -> str:
    model, capacity = source.latency, source.capacity
    words = (
        f"device: {capacity.num_device_blocks:,} + {capacity.num_host_blocks:,} blocks of {capacity.block_size}; "
        f"a step {1e3 * model.step_s:.3g} ms + {1e6 * model.token_s:.3g} us a prompt token "
        f"+ {1e9 * model.attended_s:.3g} ns a pair + {1e6 * model.row_s:.3g} us a row\n"
    )
    if source.fit is not None:
        fit = source.fit
        words += (
            f"fitted from {fit.num_steps:,} steps and {fit.num_copies:,} copies: off by {fit.median_error:.1%} in the median, "
            f"{fit.p90_error:.1%} at P90, {fit.total_error:.1%} in sum\n"
        )
    return words
