"""The scheduler and the simulated device under a virtual clock: right, repeatable, and cheap under pressure."""

from __future__ import annotations

import random
from typing import Any

import pytest

from repertory.actors.simulation.latency import LatencyModel
from repertory.actors.simulation.run import VirtualDevice, VirtualRun
from repertory.gpu.simulated import SimulatedExecutor
from repertory.protocol.config import EngineConfig, PreemptionMode
from repertory.protocol.ids import BlockId, CopyId, Epoch, RequestId, StepId
from repertory.protocol.messages import Admit, CopyBlocks, Fences, RunStep
from repertory.protocol.sampling import SamplingParams

TOKEN_S = 40e-6
BLOCK_BYTES = 16 * 128 * 1024


def arrivals(count: int, seed: int) -> list[Admit]:
    """Prompts of 32 to 128 tokens and outputs of 256 to 512, nearly at once."""
    draw = random.Random(seed)
    return [
        Admit(
            RequestId(number),
            str(number),
            [draw.randrange(1000) for _ in range(draw.randint(32, 128))],
            SamplingParams(temperature=0.0, max_tokens=draw.randint(256, 512)),
            number * 0.01,
        )
        for number in range(1, count + 1)
    ]


def serve(mode: PreemptionMode, rate: float, *, count: int = 16, seed: int = 1) -> VirtualRun:
    """An overload on a pool of 2,048 tokens, copies at `rate` bytes/s each way; `recompute` has no host tier."""
    num_host_blocks = 0 if mode == "recompute" else 1024
    config = EngineConfig(
        model="simulated",
        num_device_blocks=128,
        num_host_blocks=num_host_blocks,
        max_num_batched_tokens=256,
        preemption_mode=mode,
        credit_window=10**6,
    )
    device = SimulatedExecutor(num_device_blocks=128, num_host_blocks=num_host_blocks, block_bytes=BLOCK_BYTES)
    latency = LatencyModel(step_s=6e-3, token_s=TOKEN_S, row_s=20e-6, copy_s=20e-6, out_rate=rate, in_rate=rate)
    run = VirtualRun(config, device, latency)
    run.go(arrivals(count, seed))
    return run


def lost_s(run: VirtualRun, admits: list[Admit]) -> float:
    """Seconds of the device that preemption took."""
    needed = sum(len(admit.token_ids) + len(run.tokens[admit.request_id]) - 1 for admit in admits)
    again = run.core.stats().num_computed_tokens - needed
    return again * TOKEN_S + run.device.waited_s["step"] + run.still_s


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto", "heuristic"])
def test_every_request_gives_under_pressure_what_it_gives_alone(mode: PreemptionMode) -> None:
    run = serve(mode, 20e9)
    assert sum(run.core.stats().num_preemptions.values()) > 0
    for admit in arrivals(16, 1):
        tokens = [token for _, token in run.tokens[admit.request_id]]
        assert admit.params.max_tokens is not None
        assert tokens == run.device.executor.reference(admit.token_ids, admit.params, admit.params.max_tokens)
    assert run.core.audit() == []


def test_a_run_repeats_to_the_last_digit() -> None:
    first, second = serve("auto", 2e9), serve("auto", 2e9)
    assert (first.now, first.tokens, first.reports) == (second.now, second.tokens, second.reports)


@pytest.mark.parametrize("rate", [0.2e9, 2e9, 20e9, 50e9])
def test_the_measured_choice_loses_no_more_than_the_better_fixed_one(rate: float) -> None:
    lost = {mode: lost_s(serve(mode, rate), arrivals(16, 1)) for mode in MODES}
    best, worst = sorted((lost["recompute"], lost["swap"]))
    assert lost["auto"] <= 1.05 * best
    assert lost["auto"] <= 0.6 * worst


MODES: tuple[PreemptionMode, ...] = ("recompute", "swap", "auto")


def test_an_operation_begins_when_its_server_and_all_it_names_are_done() -> None:
    latency = LatencyModel(step_s=1.0, out_rate=float(BLOCK_BYTES), in_rate=BLOCK_BYTES / 2)
    device = VirtualDevice(SimulatedExecutor(block_bytes=BLOCK_BYTES), latency)
    assert device.issue(step(1), 0.0) == (0.0, 1.0, 0.0)
    assert device.issue(copy("out", 1, Fences(step=StepId(1))), 0.5) == (1.0, 2.0, 0.5)
    assert device.issue(step(2, copy_out=CopyId(1)), 0.5) == (2.0, 3.0, 1.0)
    assert device.issue(copy("in", 1, Fences(copy_out=CopyId(1))), 0.5) == (2.0, 4.0, 1.5)
    assert device.issue(copy("in", 2, Fences()), 0.5) == (4.0, 6.0, 0.0)
    assert device.waited_s == {"step": 1.0, "out": 0.5, "in": 1.5}


def test_a_step_takes_what_its_tokens_pairs_and_rows_take() -> None:
    latency = LatencyModel(step_s=1.0, token_s=0.1, attended_s=0.01, row_s=0.001)
    work = RunStep(Epoch(1), StepId(1), Fences(), seq_ids=[1, 2], starts=[9, 0], num_tokens=[1, 3], samples=[1, 1])  # type: ignore[list-item]
    assert latency.of_step(work) == pytest.approx(1.0 + 0.3 + 0.01 * (10 + 6) + 0.002)


def step(number: int, **after: Any) -> RunStep:
    return RunStep(Epoch(1), StepId(number), Fences(**after), seq_ids=[], starts=[], num_tokens=[], samples=[])


def copy(direction: Any, number: int, after: Fences) -> CopyBlocks:
    return CopyBlocks(Epoch(1), CopyId(number), direction, after, [BlockId(0)], [BlockId(0)])
