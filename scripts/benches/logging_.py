"""What looking on costs: host microseconds a step in logs, metrics and traces: `scripts/bench logging`.

256 requests (`--running`) run at once on a device that only sleeps for a while in each step, all actors on one thread;
each ends after `--tokens` tokens and another follows, so that admissions, ends and their canonical lines have their share.
Host time is the CPU time of that thread in a step, summed over all actors and clients; what looks on is timed by the
same clock, call by call (which adds to it half a microsecond a call), in the same run:

    logs      what the scheduler writes down at level info, as JSON to a file that is thrown away
    metrics   all counting in the scheduler (that in mailboxes is two looks at a clock for each batch, and not in it)
    traces    OpenTelemetry's SDK, with an exporter that throws spans away; and without one, when nobody records

Each is shown with its share of host time and of a step of 40 ms. Comparing whole runs with and without says nothing on a
busy machine: they differ by more than all this costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import structlog
from opentelemetry import trace

from repertory import Engine, EngineConfig, SamplingParams
from repertory.actors.devices.keeper import DeviceKeeper
from repertory.actors.observing import tracing
from repertory.actors.observing.logs import configure_logging
from repertory.actors.observing.periodic import PeriodicStatistics
from repertory.actors.observing.tracing import RequestTrace
from repertory.actors.scheduler import Scheduler
from repertory.actors.scheduling.counts import Counts
from repertory.protocol.messages import CopyDone, RunStep, StepDone
from repertory.scripts.benches.overhead import BLOCK_SIZE, MODEL_LENGTH, PROMPT_TOKENS, VOCAB_SIZE, ConstantExecutor, Stopwatch
from repertory.tests.tiny_model import make_tiny_model

AIM_HOST_SHARE = 0.10
AIM_STEP_SHARE = 0.01
STEP_S = 0.040
DEVICE_S = 0.008
WINDOW = 100


class SleepingExecutor(ConstantExecutor):
    """Takes its time, so that whoever comes next has arrived before a step ends, and no core's."""

    def run_step(self, step: RunStep) -> StepDone:
        """Answer after `DEVICE_S`."""
        time.sleep(DEVICE_S)
        return super().run_step(step)


def open_sleeping(config: EngineConfig, model_dir: Path) -> SleepingExecutor:
    """The device opener."""
    return SleepingExecutor(config)


class SilentExporter:
    """Takes spans, and that is all."""

    def export(self, spans: Any) -> Any:
        """Thrown away."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing to close."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is kept."""
        return True


@contextlib.contextmanager
def everything_on(*, has_sdk: bool) -> Iterator[None]:
    """Logs at level info, and traces if there is an SDK, while the engine lives."""
    with contextlib.ExitStack() as stack:
        structlog.reset_defaults()
        sink = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        configure_logging("json", "info", sink, foreign=False)
        if has_sdk:
            provider = silent_provider()
            stack.callback(provider.shutdown)
            stack.enter_context(mock.patch.object(trace, "get_tracer_provider", return_value=provider))
        yield
    structlog.reset_defaults()


def wrap_lookers(stopwatch: Stopwatch) -> None:
    """Time whatever looks on, in every engine of this process from now on."""
    stopwatch.function(Scheduler, "_write_down", "logs")
    stopwatch.function(PeriodicStatistics, "tick", "logs")
    for method in [name for name in vars(Counts) if name.startswith("on_")]:
        stopwatch.function(Counts, method, "metrics")
    stopwatch.function(RequestTrace, "end", "traces")
    stopwatch.function(tracing, "begin", "traces")


def silent_provider() -> Any:
    """An SDK as a server has it: spans leave in batches, on a thread of their own."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(SilentExporter()))  # type: ignore[arg-type]  # it has all that is called
    return provider


class Windows:
    """CPU seconds of the loop's thread, window after window of `WINDOW` steps, from when most requests run."""

    def __init__(self, stopwatch: Stopwatch, num_running: int, num_warm: int, num_windows: int) -> None:
        self._stopwatch = stopwatch
        self._num_running = num_running
        self._num_left = num_warm + num_windows * WINDOW + 1
        self._num_measured = num_windows * WINDOW + 1
        self._edges: list[dict[str, float]] = []
        self.are_over = asyncio.Event()

    def on_step(self, message: StepDone) -> None:
        """A step was answered, on the loop's thread."""
        if self._num_left == 0 or len(message.seq_ids) < self._num_running * 0.8:
            return
        if self._num_left <= self._num_measured and (self._num_left - 1) % WINDOW == 0:
            self._edges.append({"host": time.thread_time(), **self._stopwatch.seconds})
        self._num_left -= 1
        if self._num_left == 0:
            self.are_over.set()

    def quietest(self) -> dict[str, float]:
        """Microseconds a step, of the window that took the least: who else is on the machine only adds."""
        windows = [
            {name: (after[name] - before.get(name, 0.0)) / WINDOW * 1e6 for name in after}
            for before, after in itertools.pairwise(self._edges)
        ]
        return min(windows, key=lambda one: one["host"])


async def measure(stopwatch: Stopwatch, model: Path, num_running: int, num_tokens: int, num_windows: int) -> dict[str, float]:
    """Host microseconds a step, by what they were for."""
    windows = Windows(stopwatch, num_running, max(20, num_tokens), num_windows)
    original = DeviceKeeper._on_answer

    def on_answer(keeper: DeviceKeeper, message: StepDone | CopyDone) -> None:
        if isinstance(message, StepDone):
            windows.on_step(message)
        original(keeper, message)

    with mock.patch.object(DeviceKeeper, "_on_answer", on_answer):
        async with Engine(config_for(model, num_running, num_tokens), open_device=open_sleeping) as engine:
            readers = [asyncio.create_task(read(engine, number, num_tokens)) for number in range(num_running)]
            await windows.are_over.wait()
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
    return windows.quietest()


def config_for(model: Path, num_running: int, num_tokens: int) -> EngineConfig:
    """Memory for everybody, and for what the scheduler reserves for growth."""
    return EngineConfig(
        model=str(model),
        device="simulated",
        worker="inline",
        block_size=BLOCK_SIZE,
        num_device_blocks=num_running * (PROMPT_TOKENS + num_tokens + 8192) // BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running + 16 * PROMPT_TOKENS,
    )


async def read(engine: Engine, number: int, num_tokens: int) -> None:
    """One client: request after request. The first ones are of different lengths, so that their ends spread."""
    turn = 0
    while True:
        turn += 1
        length = num_tokens if turn > 1 else 1 + number % num_tokens
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, output_kind="delta")
        prompt = [3 + (number + turn + position * (number + 1)) % 256 for position in range(PROMPT_TOKENS)]
        async for _ in engine.generate(prompt, params):
            pass


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="scripts/bench logging", description=__doc__)
    parser.add_argument("--running", type=int, default=256, help="requests at once (default: 256)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer (default: 128)")
    parser.add_argument(
        "--windows", type=int, default=8, help=f"measured windows of {WINDOW} steps, of which the quietest counts (default: 8)"
    )
    arguments = parser.parse_args()
    stopwatch = Stopwatch()
    wrap_lookers(stopwatch)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder), weights=False, vocab_size=VOCAB_SIZE, max_position_embeddings=MODEL_LENGTH)
        (model / "tokenizer_config.json").write_text("{}")  # no chat template: nothing here chats
        for has_sdk in (True, False):
            with everything_on(has_sdk=has_sdk):
                run = measure(stopwatch, model, arguments.running, arguments.tokens, arguments.windows)
                found[has_sdk] = asyncio.run(run)
    report(found[True], without_sdk=found[False], num_running=arguments.running)


def report(times: dict[str, float], *, without_sdk: dict[str, float], num_running: int) -> None:
    """Print what was found."""
    parts = ("logs", "metrics", "traces")
    rows = {name: times[name] for name in parts}
    rows["all three"] = sum(rows.values())
    rows["traces, no SDK"] = without_sdk["traces"]
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {num_running} running")
    print(f"host time {times['host']:.0f} us a step, {without_sdk['host']:.0f} without an SDK")
    print(f"{'us a step':<16} {'':>8} {'of host':>8} {'of 40 ms':>9}")
    for name, microseconds in rows.items():
        print(f"{name:<16} {microseconds:>8.1f} {microseconds / times['host']:>8.1%} {microseconds / (STEP_S * 1e6):>9.2%}")
    print(f"aims: all three at most {AIM_HOST_SHARE:.0%} of host time and {AIM_STEP_SHARE:.0%} of a step of 40 ms")


if __name__ == "__main__":
    main()
