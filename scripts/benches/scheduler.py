"""Microseconds the scheduler's core takes for a step of running decodes: `scripts/bench scheduler`.

The device is left out: each step is answered at once with made-up tokens. A step is `plan`,
`on_step_done` and `take_outputs`; prompts, growth over block boundaries and (where asked for) a long
queue of waiting requests are real. p50 over the steps of one run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import NamedTuple

from repertory.actors.scheduling.core import SchedulerCore
from repertory.actors.scheduling.reserve import MOST_TOKENS
from repertory.gpu.executor import Capacity
from repertory.protocol.config import EngineConfig
from repertory.protocol.ids import Epoch, RequestId
from repertory.protocol.messages import Admit, RunStep, StepDone
from repertory.protocol.sampling import SamplingParams

PROMPT_TOKENS = 128
VOCAB_SIZE = 32_000
BLOCK_SIZE = 16
PARAMS = SamplingParams(temperature=0.0, max_tokens=100_000)


class Times(NamedTuple):
    """Microseconds of one step's three calls."""

    plan: float
    done: float
    outputs: float


def main() -> None:
    """Print a table of step times by number of running and waiting requests."""
    parser = argparse.ArgumentParser(prog="scripts/bench scheduler", description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="measured steps per line (default: 400)")
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256, 1024], help="running decodes")
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000], help="waiting requests")
    arguments = parser.parse_args()
    print(f"{'running':>8} {'waiting':>8} {'plan us':>9} {'done us':>9} {'outputs us':>11} {'step us':>9} {'us/request':>11}")
    for num_waiting in arguments.waiting:
        for num_running in arguments.running:
            times = measure(num_running, num_waiting, num_steps=arguments.steps)
            plan, done, outputs = (statistics.median(column) for column in zip(*times, strict=True))
            step = statistics.median(sum(row) for row in times)
            row = f"{plan:>9.1f} {done:>9.1f} {outputs:>11.1f} {step:>9.1f} {step / num_running:>11.2f}"
            print(f"{num_running:>8} {num_waiting:>8} {row}")


def measure(num_running: int, num_waiting: int, *, num_steps: int) -> list[Times]:
    """Times of `num_steps` steps of `num_running` decodes, with `num_waiting` requests behind them."""
    core = filled_core(num_running, num_waiting, num_steps=num_steps)
    rng = random.Random(1)
    while len(core.queues.running) < num_running or any(seq.is_prefilling for seq in core.queues.running):
        one_step(core, rng)
    return [one_step(core, rng) for _ in range(num_steps)]


def filled_core(num_running: int, num_waiting: int, *, num_steps: int) -> SchedulerCore:
    """A core with memory for the whole run and all requests submitted."""
    blocks_each = (PROMPT_TOKENS + num_steps + MOST_TOKENS) // BLOCK_SIZE  # so that the reserve keeps nobody out
    config = EngineConfig(
        model="none",
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_queued=num_running + num_waiting,
        max_num_batched_tokens=num_running + 8192,
        max_steps_in_flight=1,
    )
    capacity = Capacity(
        device="none",
        num_device_blocks=num_running * blocks_each,
        num_host_blocks=0,
        block_size=BLOCK_SIZE,
        block_bytes=0,
        vocab_size=VOCAB_SIZE,
        max_model_len=1_000_000,
    )
    core = SchedulerCore(config, capacity, epoch=Epoch(1))
    rng = random.Random(0)
    for number in range(num_running + num_waiting):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
        core.on_admit(Admit(RequestId(number + 1), "", prompt, PARAMS, 0.0), 0.0)
    return core


def one_step(core: SchedulerCore, rng: random.Random) -> Times:
    """Plan a step, answer it, take what is sent on."""
    start = time.perf_counter_ns()
    step = core.plan(0.0)
    planned = time.perf_counter_ns()
    assert step is not None, "nothing to run"
    answer = made_up_answer(step, rng)
    answered = time.perf_counter_ns()
    core.on_step_done(answer, 0.0)
    done = time.perf_counter_ns()
    core.take_outputs(0.0)
    core.take_reports()
    taken = time.perf_counter_ns()
    return Times((planned - start) / 1e3, (done - answered) / 1e3, (taken - done) / 1e3)


def made_up_answer(step: RunStep, rng: random.Random) -> StepDone:
    """What a device would answer, had it drawn at random."""
    sampled = [seq_id for seq_id, samples in zip(step.seq_ids, step.samples, strict=True) if samples]
    return StepDone(step.epoch, step.step_id, sampled, [rng.randrange(VOCAB_SIZE) for _ in sampled], 0.01)


if __name__ == "__main__":
    main()
