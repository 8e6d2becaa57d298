"""Copies between the tiers on a Llama-8B shape: are they exact, how fast, and what do they cost the steps beside them?

round trip      random bits in host blocks, to scattered device blocks and back to others, while steps run
rates           each lane alone, and both, against plain pinned copies measured just before
hidden          1 - (slower steps + waits) / copying: of the seconds that both lanes copied while steps ran, the share that
                lengthened no step. As in `scripts/bench overlap`.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from repertory.gpu.cuda.executor import PendingStep
from repertory.protocol.ids import BlockId, SequenceId
from repertory.protocol.messages import Fences

from ..ceilings import measure_copies
from ..driving import Driver, Ran
from ..gpu import Gpu, WatchedRuntime
from ..lanes import DIRECTIONS, Lane, busy, rate, seconds_within
from ..report import Report
from ..shapes import LLAMA_8B, TINY, RandomWeights, write_model

LEAST_RATE, LEAST_HIDDEN = 80.0, 90.0
"""Percent."""

LANE_BLOCKS, AT_ONCE = 256, 64
CONTEXT, ROOM = 1024, 256
ROWS = 32


class Stage(NamedTuple):
    """An executor with sequences that decode, and two lanes with blocks of their own."""

    driver: Driver
    rows: list[SequenceId]
    lanes: list[Lane]
    host: Tensor
    """The host tier, one block after another."""


def run(report: Report, gpu: Gpu) -> None:
    """The part."""
    plain = measure_copies(gpu)
    report.figure("plain pinned copies, out", plain.out / 1e9, "GB/s", note=f"{plain.out_beside / 1e9:.3g} beside copies in")
    report.figure("plain pinned copies, in", plain.into / 1e9, "GB/s", note=f"{plain.into_beside / 1e9:.3g} beside copies out")
    num_rows, context, room = gpu.sized((ROWS, CONTEXT, ROOM), (3, 20, 60))
    blocks = num_rows * -(-(context + room) // 16)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), gpu.sized(LLAMA_8B, TINY), weights=False)
        config = gpu.config(
            model, dtype=gpu.sized("bfloat16", "float32"), max_model_len=context + room, max_num_batched_tokens=2048,
            max_num_seqs=num_rows, num_device_blocks=blocks + 2 * LANE_BLOCKS, num_host_blocks=2 * LANE_BLOCKS,
        )  # fmt: skip
        executor, runtime = gpu.open(config, load=RandomWeights())
    try:
        report.say("opened")
        driver = Driver(executor, num_blocks=blocks)
        stage = Stage(driver, _rows(gpu, driver, num_rows, context, room), _lanes(driver, blocks), _host_pool(runtime))
        _check_round_trip(report, stage)
        alone = _rates(stage, gpu.sized(1.0, 0.05))
        for direction, found, reference in zip(DIRECTIONS, alone, (plain.out, plain.into), strict=True):
            report.at_least(
                f"swap {direction}, of a plain copy", 100 * found / reference, "%", LEAST_RATE, note=f"{found / 1e9:.3g} GB/s"
            )
        _check_overlap(report, gpu, stage)
    finally:
        executor.close()


def _rows(gpu: Gpu, driver: Driver, num_rows: int, context: int, room: int) -> list[SequenceId]:
    vocab_size = driver.executor.capacity.vocab_size
    draw = random.Random(1)
    rows = [driver.admit(draw.choices(range(vocab_size), k=context), room=room) for _ in range(num_rows)]
    driver.prefill(rows, budget=2048)
    driver.decode(rows, gpu.sized(10, 2))
    return rows


def _lanes(driver: Driver, first: int) -> list[Lane]:
    """Each with blocks of its own: past those of the sequences, in scattered order."""
    draw = random.Random(2)
    lanes = []
    for number, direction in enumerate(DIRECTIONS):
        device = [BlockId(first + number * LANE_BLOCKS + i) for i in range(LANE_BLOCKS)]
        host = [BlockId(number * LANE_BLOCKS + i) for i in range(LANE_BLOCKS)]
        draw.shuffle(device)
        lanes.append(Lane(driver.executor, direction, device, host, at_once=AT_ONCE))
    return lanes


def _host_pool(runtime: WatchedRuntime) -> Tensor:
    """The one pinned tensor with the pool's shape."""
    (pool,) = (tensor for tensor in runtime.pinned_tensors if tensor.dim() == 6)
    return pool.view(torch.uint8).flatten(1)


def _check_round_trip(report: Report, stage: Stage) -> None:
    """Random bits to the device and back while steps run, three times over other blocks."""
    out, into = stage.lanes
    half = LANE_BLOCKS // 2
    wrong = 0
    generator = torch.Generator().manual_seed(0)
    for number in range(3):
        steps = [stage.driver.launch(dict.fromkeys(stage.rows, 1)) for _ in range(2)]
        order = random.Random(number).sample(range(LANE_BLOCKS), LANE_BLOCKS)
        sources, targets = order[:half], order[half:]
        size = (half, stage.host.shape[1])
        stage.host[sources] = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        stage.host[targets] = 0
        device = into.device[:half]
        into.copy([BlockId(block) for block in sources], device)
        out.copy(device, [BlockId(block) for block in targets])
        wrong += int((stage.host[sources] != stage.host[targets]).any(dim=1).sum())
        for step in steps:
            step.result()
    report.right("blocks to the device and back", not wrong, value=3 * half, unit="blocks", note=f"bit for bit; {wrong} differ")


def _rates(stage: Stage, seconds: float) -> list[float]:
    """Of each lane alone, bytes a second."""
    rates = []
    for lane in stage.lanes:
        busy([lane], lambda: time.sleep(seconds / 4))  # whatever is slow for the first time
        (copies,) = busy([lane], lambda: time.sleep(seconds))
        rates.append(rate(copies))
    return rates


def _check_overlap(report: Report, gpu: Gpu, stage: Stage) -> None:
    """Windows of decode steps with idle lanes and with busy ones, in turn."""
    idle: list[Ran] = []
    beside: list[Ran] = []
    copies_s = 0.0
    moved = 0
    windows, steps = gpu.sized((4, 25), (2, 3))
    for _ in range(windows):
        idle.append(stage.driver.decode(stage.rows, steps))
        ran: list[Ran] = []
        copied = busy(stage.lanes, lambda ran=ran: ran.append(_decode_behind_copies(stage, steps)))  # type: ignore[misc]
        beside += ran
        copies_s += sum(seconds_within(lane, ran[0].began_s, ran[0].ended_s[-1]) for lane in copied)
        moved += sum(one.done.num_bytes for lane in copied for one in lane)
    idle_s, busy_s = (statistics.median(done.seconds for one in all_of for done in one.done) for all_of in (idle, beside))
    waited_s = statistics.fmean(done.waited_s for one in beside for done in one.done)
    num_steps = windows * steps
    lost_s = (busy_s - idle_s + waited_s) * num_steps
    report.figure(f"a decode step of {len(stage.rows)} rows, idle lanes", idle_s * 1e3, "ms")
    report.figure(
        "the same beside both lanes",
        busy_s * 1e3,
        "ms",
        note=f"{busy_s / idle_s:.3f} times as long; waits {waited_s * 1e3:.2g} ms",
    )
    share = 100 * (1 - lost_s / copies_s) if copies_s else float("nan")
    note = f"{moved / 1e9:.3g} GB while {num_steps} steps ran"
    report.at_least("copying hidden behind steps", share, "%", LEAST_HIDDEN, note=note)


def _decode_behind_copies(stage: Stage, steps: int) -> Ran:
    """Each step waits for the copies sent before the launch of the one before it, as the scheduler's do at the latest."""
    sent = Fences()

    def launch(_: int) -> PendingStep:
        nonlocal sent
        after = sent
        out, into = stage.lanes
        sent = Fences(copy_out=out.last_sent, copy_in=into.last_sent)
        return stage.driver.launch(dict.fromkeys(stage.rows, 1), after=after)

    return stage.driver.ahead(steps, launch)
