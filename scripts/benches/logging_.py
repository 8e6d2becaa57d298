"""What looking on costs: host microseconds a step with logs, metrics and traces, and without: `scripts/bench logging`.

256 requests (`--running`) run at once on a device that only sleeps for a while in each step, all actors on one thread;
each ends after `--tokens` tokens and another follows, so that admissions, ends and their canonical lines have their share.
Host time is the CPU time of that thread. The variants take turns, some steps each, `--rounds` times, and the medians of
what each adds to "nothing" in the same round are printed: with its share of the host time of all that is on, and of a
step of 40 ms.

    nothing     log level error, nothing counted, no tracer
    logs        log level info, JSON to a file that is thrown away
    metrics     counting in the scheduler and in mailboxes
    traces      OpenTelemetry's SDK with an exporter that throws spans away
    all         all three
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import statistics
import sys
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
from repertory.actors.observing.logs import configure_logging
from repertory.actors.scheduling.counts import Counts
from repertory.protocol.messages import CopyDone, RunStep, StepDone
from repertory.scripts.benches.overhead import BLOCK_SIZE, MODEL_LENGTH, PROMPT_TOKENS, VOCAB_SIZE, ConstantExecutor
from repertory.tests.tiny_model import make_tiny_model

AIM_HOST_SHARE = 0.10
AIM_STEP_SHARE = 0.01
STEP_S = 0.040
DEVICE_S = 0.008
VARIANTS = ("nothing", "logs", "metrics", "traces", "all")
COUNTING = [name for name in vars(Counts) if name.startswith("on_")]


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
def variant(name: str) -> Iterator[None]:
    """What is on while the engine lives."""
    with contextlib.ExitStack() as stack:
        structlog.reset_defaults()
        configure_logging("json", "info" if name in ("logs", "all") else "error", stack.enter_context(sink()), foreign=False)
        if name not in ("metrics", "all"):
            for method in COUNTING:
                stack.enter_context(mock.patch.object(Counts, method, return_value=None))
        if name in ("traces", "all"):
            provider = silent_provider()
            stack.callback(provider.shutdown)
            stack.enter_context(mock.patch.object(trace, "get_tracer_provider", return_value=provider))
        yield
    structlog.reset_defaults()


def sink() -> io.TextIOWrapper:
    """A file that keeps nothing."""
    return open(os.devnull, "w", encoding="utf-8")


def silent_provider() -> Any:
    """An SDK as a server has it: spans leave in batches, on a thread of their own."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(SilentExporter()))  # type: ignore[arg-type]  # it has all that is called
    return provider


class Window:
    """CPU seconds of the loop's thread over some steps, from when all requests run."""

    def __init__(self, num_running: int, num_warm: int, num_steps: int) -> None:
        self._num_running = num_running
        self._num_left = num_warm + num_steps
        self._num_steps = num_steps
        self._began_s = 0.0
        self.us_per_step = 0.0
        self.is_over = asyncio.Event()

    def on_step(self, message: StepDone) -> None:
        """A step was answered, on the loop's thread."""
        if self._num_left == 0 or len(message.seq_ids) < self._num_running * 0.9:
            return
        if self._num_left == self._num_steps:
            self._began_s = time.thread_time()
        self._num_left -= 1
        if self._num_left == 0:
            self.us_per_step = (time.thread_time() - self._began_s) / (self._num_steps - 1) * 1e6
            self.is_over.set()


async def measure(model: Path, num_running: int, num_tokens: int, num_steps: int) -> float:
    """Host microseconds a step."""
    window = Window(num_running, num_warm=max(20, num_tokens), num_steps=num_steps)
    original = DeviceKeeper._on_answer

    def on_answer(keeper: DeviceKeeper, message: StepDone | CopyDone) -> None:
        if isinstance(message, StepDone):
            window.on_step(message)
        original(keeper, message)

    with mock.patch.object(DeviceKeeper, "_on_answer", on_answer):
        async with Engine(config_for(model, num_running, num_tokens), open_device=open_sleeping) as engine:
            readers = [asyncio.create_task(read(engine, number, num_tokens)) for number in range(num_running)]
            await window.is_over.wait()
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
    return window.us_per_step


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
    parser.add_argument("--steps", type=int, default=300, help="measured steps of each turn (default: 300)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant (default: 5)")
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder), weights=False, vocab_size=VOCAB_SIZE, max_position_embeddings=MODEL_LENGTH)
        (model / "tokenizer_config.json").write_text("{}")  # no chat template: nothing here chats
        for _ in range(arguments.rounds):
            for name in VARIANTS:
                with variant(name):
                    us = asyncio.run(measure(model, arguments.running, arguments.tokens, arguments.steps))
                found[name].append(us)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {arguments.running} running, microseconds a step")
    print(f"{'':<8} {'host':>8} {'added':>8} {'of host':>8} {'of 40 ms':>8}")
    whole = statistics.median(found["all"])
    for name in VARIANTS:
        added = statistics.median(one - base for one, base in zip(found[name], found["nothing"], strict=True))
        share, step_share = added / whole, added / (STEP_S * 1e6)
        print(f"{name:<8} {statistics.median(found[name]):>8.0f} {added:>8.0f} {share:>8.1%} {step_share:>8.2%}")
    print(f"aims: logs, metrics and traces together at most {AIM_HOST_SHARE:.0%} of host time, {AIM_STEP_SHARE:.0%} of 40 ms")


if __name__ == "__main__":
    sys.exit(main())
