"""What a trace costs the scheduler: `scripts/bench recorder`.

The scheduler's actor handles steps of running decodes, answered at once with made-up tokens, without a recorder and with
one, in turn. "loop" is CPU time of the thread that the scheduler shares with the event loop, for one step: answer, plan, send,
outputs. "writer" is CPU time of the trace's own thread, which comes to the loop only as far as both want the interpreter at
once. Medians over windows; bytes are what the trace grew by.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, cast

from repertory.actors.mailbox import Mailbox
from repertory.actors.observing.logs import configure_logging
from repertory.actors.observing.recorder import Recorder
from repertory.actors.scheduler import Scheduler
from repertory.protocol.config import EngineConfig
from repertory.protocol.messages import CopyBlocks, RunStep, StepDone
from repertory.scripts.benches.scheduler import VOCAB_SIZE, Setting, filled_core

WINDOW = 50
PROMPT_TOKENS = 128


class Cost(NamedTuple):
    """Of one step, in microseconds and bytes."""

    loop_us: float
    writer_us: float
    num_bytes: float


def main() -> None:
    """Print a line for each number of running requests, with each kind of trace."""
    parser = argparse.ArgumentParser(prog="scripts/bench recorder", description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="measured steps of each kind (default: 400)")
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256], help="running decodes")
    arguments = parser.parse_args()
    configure_logging("json", "warning")
    print(f"{'running':>8} {'trace':>8} {'loop us':>9} {'more us':>9} {'more %':>7} {'writer us':>10} {'bytes/step':>11}")
    for num_running in arguments.running:
        off = measure(num_running, arguments.steps, None)
        for kind in ("off", "named", "content"):
            cost = off if kind == "off" else measure(num_running, arguments.steps, kind)
            more = cost.loop_us - off.loop_us
            row = (
                f"{cost.loop_us:>9.1f} {more:>9.1f} {more / off.loop_us:>7.1%} {cost.writer_us:>10.1f} {cost.num_bytes:>11.0f}"
            )
            print(f"{num_running:>8} {kind:>8} {row}")


def measure(num_running: int, num_steps: int, kind: str | None) -> Cost:
    """Steps of `num_running` decodes with a trace of this kind, or none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        core = filled_core(Setting("fcfs", PROMPT_TOKENS, 0, num_running), num_steps=num_steps + WINDOW)
        config = EngineConfig(model="none", trace_file=str(path), trace_content=kind == "content")
        recorder = Recorder(core, config) if kind is not None else None
        sent: list[RunStep] = []
        scheduler = Scheduler(
            core,
            inbox=cast("Mailbox[Any]", None),
            device=lambda operation, predicted_s: _keep(operation, sent),
            detokenizer=cast("Mailbox[Any]", None),
            on_culprit=lambda: None,
            recorder=recorder,
        )
        draw = random.Random(1)
        scheduler.send_steps()
        while len(core.queues.running) < num_running or any(seq.is_prefilling for seq in core.queues.running):
            _step(scheduler, recorder, sent, draw)
        windows: list[float] = []
        began_bytes, began_all_s, began_loop_s = _size(path), time.process_time(), time.thread_time()
        for _ in range(num_steps // WINDOW):
            began_s = time.thread_time()
            for _ in range(WINDOW):
                _step(scheduler, recorder, sent, draw)
            windows.append((time.thread_time() - began_s) / WINDOW)
        loop_s = time.thread_time() - began_loop_s
        if recorder is not None:
            time.sleep(0.3)  # the writer's last lines are part of the price
        writer_s = time.process_time() - began_all_s - loop_s
        num_bytes = _size(path) - began_bytes
        if recorder is not None:
            recorder.close()
        return Cost(1e6 * statistics.median(windows), 1e6 * writer_s / num_steps, num_bytes / num_steps)


def _step(scheduler: Scheduler, recorder: Recorder | None, sent: list[RunStep], draw: random.Random) -> None:
    """One turn of the scheduler: the answer to its last step comes, and it sends the next."""
    step = sent.pop(0)
    samplers = [seq_id for seq_id, samples in zip(step.seq_ids, step.samples, strict=True) if samples]
    now = time.monotonic()
    tokens = draw.choices(range(VOCAB_SIZE), k=len(samplers))
    scheduler._handle(StepDone(step.epoch, step.step_id, samplers, tokens, 0.001), now)
    scheduler.send_steps()
    outputs, reports = scheduler.core.take_outputs(now), scheduler.core.take_reports()
    if recorder is not None:
        recorder.told(outputs, reports, now)


def _keep(operation: RunStep | CopyBlocks, sent: list[RunStep]) -> None:
    if isinstance(operation, RunStep):
        sent.append(operation)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


if __name__ == "__main__":
    main()
