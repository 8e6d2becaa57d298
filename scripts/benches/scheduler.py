"""Microseconds the scheduler's core takes for a step of running decodes: `scripts/bench scheduler`.

The device is left out: each step is answered at once with made-up tokens. A step is `plan`,
`on_step_done` and `take_outputs`; prompts, growth over block boundaries and (where asked for) a long
queue of waiting requests are real. p50 over the steps of one run, of the processor time of this thread: others on the machine
count only by the caches they empty.

Prompts are of as many groups as there are running requests, half of each prompt shared within its group. With `--churn`
one running request is aborted before each step, the next is admitted and a new one arrives: a step then holds an
admission with its lookup, a prefill, an end, and (timed apart) an arrival. `--policies` and `--prompts` take several values.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import time
from typing import NamedTuple

from repertory.actors.scheduling.core import SchedulerCore
from repertory.actors.scheduling.reserve import MOST_TOKENS
from repertory.gpu.executor import Capacity
from repertory.protocol.config import EngineConfig
from repertory.protocol.ids import Epoch, RequestId
from repertory.protocol.messages import Abort, Admit, RunStep, StepDone
from repertory.protocol.sampling import SamplingParams

VOCAB_SIZE = 32_000
BLOCK_SIZE = 16
PARAMS = SamplingParams(temperature=0.0, max_tokens=100_000, output_kind="final_only")
AIM_US_PER_REQUEST = 3.0


class Times(NamedTuple):
    """Microseconds of one step's three calls."""

    plan: float
    done: float
    outputs: float
    arrival: float


class Setting(NamedTuple):
    """What is compared."""

    policy: str
    prompt_tokens: int
    num_waiting: int
    num_running: int


def main() -> None:
    """Print a table of step times by number of running and waiting requests."""
    parser = argparse.ArgumentParser(prog="scripts/bench scheduler", description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="measured steps per line (default: 400)")
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256, 1024], help="running decodes")
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000], help="waiting requests")
    parser.add_argument("--policies", nargs="+", default=["fcfs"], help="scheduling policies (default: fcfs)")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128], help="tokens of a prompt (default: 128)")
    parser.add_argument("--churn", action="store_true", help="an end, an admission and an arrival with each step")
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; aim: {AIM_US_PER_REQUEST:g} us/request")
    print(
        f"{'policy':>14} {'prompt':>7} {'waiting':>8} {'running':>8} {'plan us':>9} {'done us':>9} {'outputs us':>11} "
        f"{'arrival us':>11} {'step us':>9} {'us/request':>11} {'P99 us':>9}"
    )
    grid = itertools.product(arguments.policies, arguments.prompts, arguments.waiting, arguments.running)
    for setting in itertools.starmap(Setting, grid):
        times = measure(setting, num_steps=arguments.steps, churn=arguments.churn)
        plan, done, outputs, arrival = (statistics.median(column) for column in zip(*times, strict=True))
        steps = sorted(row.plan + row.done + row.outputs for row in times)
        step = statistics.median(steps)
        print(
            f"{setting.policy:>14} {setting.prompt_tokens:>7} {setting.num_waiting:>8} {setting.num_running:>8} {plan:>9.1f} "
            f"{done:>9.1f} {outputs:>11.1f} {arrival:>11.1f} {step:>9.1f} {step / setting.num_running:>11.2f} "
            f"{steps[int(0.99 * len(steps))]:>9.1f}",
            flush=True,
        )


def measure(setting: Setting, *, num_steps: int, churn: bool) -> list[Times]:
    """Times of `num_steps` steps of `num_running` decodes, with `num_waiting` requests behind them."""
    core = filled_core(setting, num_steps=num_steps)
    rng = random.Random(1)
    while len(core.queues.running) < setting.num_running or any(seq.is_prefilling for seq in core.queues.running):
        one_step(core, rng)
    found = []
    for number in range(num_steps):
        arrival = turn_over(core, rng, setting, setting.num_running + setting.num_waiting + number) if churn else 0.0
        found.append(one_step(core, rng)._replace(arrival=arrival))
    return found


def filled_core(setting: Setting, *, num_steps: int) -> SchedulerCore:
    """A core with memory for the whole run and all requests submitted."""
    blocks_each = (2 * setting.prompt_tokens + num_steps + MOST_TOKENS) // BLOCK_SIZE  # so that the reserve keeps nobody out
    config = EngineConfig(
        model="none",
        block_size=BLOCK_SIZE,
        max_num_seqs=setting.num_running,
        max_num_queued=2 * (setting.num_running + setting.num_waiting) + num_steps,
        max_num_batched_tokens=setting.num_running + 8192,
        max_steps_in_flight=1,
        scheduling_policy=setting.policy,
    )
    capacity = Capacity(
        device="none",
        num_device_blocks=setting.num_running * blocks_each,
        num_host_blocks=0,
        block_size=BLOCK_SIZE,
        block_bytes=0,
        vocab_size=VOCAB_SIZE,
        max_model_len=1_000_000,
    )
    core = SchedulerCore(config, capacity, epoch=Epoch(1))
    for number in range(setting.num_running + setting.num_waiting):
        core.on_admit(new_request(setting, number), 0.0)
    return core


def new_request(setting: Setting, number: int) -> Admit:
    """The request of this number: of a group, a tenant and a class that it shares with others."""
    half = setting.prompt_tokens // 2
    shared, own = random.Random(-1 - number % setting.num_running), random.Random(number)
    prompt = [shared.randrange(VOCAB_SIZE) for _ in range(half)]
    prompt += [own.randrange(VOCAB_SIZE) for _ in range(setting.prompt_tokens - half)]
    tenant = f"tenant {number % 50}"
    return Admit(RequestId(number + 1), "", prompt, PARAMS, 0.0, priority=0, tenant=tenant)


def turn_over(core: SchedulerCore, rng: random.Random, setting: Setting, number: int) -> float:
    """A running request ends and a new one arrives; returns the microseconds of the arrival."""
    core.on_abort(Abort(rng.choice(core.queues.running).request_id), 0.0)
    request = new_request(setting, number)
    start = time.thread_time_ns()
    core.on_admit(request, 0.0)
    return (time.thread_time_ns() - start) / 1e3


def one_step(core: SchedulerCore, rng: random.Random) -> Times:
    """Plan a step, answer it, take what is sent on."""
    start = time.thread_time_ns()
    step = core.plan(0.0)
    planned = time.thread_time_ns()
    assert step is not None, "nothing to run"
    answer = made_up_answer(step, rng)
    answered = time.thread_time_ns()
    core.on_step_done(answer, 0.0)
    done = time.thread_time_ns()
    core.take_outputs(0.0)
    core.take_reports()
    taken = time.thread_time_ns()
    return Times((planned - start) / 1e3, (done - answered) / 1e3, (taken - done) / 1e3, 0.0)


def made_up_answer(step: RunStep, rng: random.Random) -> StepDone:
    """What a device would answer, had it drawn at random."""
    sampled = [seq_id for seq_id, samples in zip(step.seq_ids, step.samples, strict=True) if samples]
    return StepDone(step.epoch, step.step_id, sampled, [rng.randrange(VOCAB_SIZE) for _ in sampled], 0.01)


if __name__ == "__main__":
    main()
