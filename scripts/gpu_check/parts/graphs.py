"""Decode steps captured and replayed, against the same launched one operation at a time."""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path

from ..driving import Driver
from ..gpu import Gpu
from ..report import Report
from ..shapes import LLAMA_8B, SMOLLM2, TINY, RandomWeights, Shape, write_model

CONTEXT = 256
NUM_STEPS = 40


def run(report: Report, gpu: Gpu) -> None:
    """The part."""
    shapes = gpu.sized({"SmolLM2-135M": SMOLLM2, "Llama-8B": LLAMA_8B}, {"tiny": TINY})
    if not gpu.facts.has_triton:
        report.skip("captured steps", "there is no Triton here, and nothing else of a step can be captured")
    for name, shape in shapes.items():
        _compare(report, gpu, name, shape)


def _compare(report: Report, gpu: Gpu, name: str, shape: Shape) -> None:
    rows = gpu.sized([1, 8, 32, 128], [1, 3])
    load = RandomWeights()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), shape, weights=False)
        eager, tokens, _ = _step_times(gpu, model, rows, load, enforce_eager=True)
        captured, same_tokens, num_replays = _step_times(gpu, model, rows, load, enforce_eager=False)
    for count in rows:
        note = f"{eager[count] * 1e3:.3g} ms one by one, {eager[count] / captured[count]:.2f} times as long"
        report.figure(f"{name}, a decode step of {count} rows, captured", captured[count] * 1e3, "ms", note=note)
    if gpu.facts.has_triton:
        report.right(f"{name}: steps replayed", num_replays > 0, value=num_replays)
    agreement = sum(a == b for a, b in zip(tokens, same_tokens, strict=True)) / len(tokens)
    report.figure(f"{name}: first tokens equal, captured and not", 100 * agreement, "%", note="bfloat16: near ties part")


def _step_times(
    gpu: Gpu, model: Path, rows: list[int], load: RandomWeights, *, enforce_eager: bool
) -> tuple[dict[int, float], list[int], int]:
    """Seconds of a step by number of rows, answer to answer; the tokens of the first step; replayed steps."""
    context, num_steps = gpu.sized((CONTEXT, NUM_STEPS), (12, 4))
    room = (num_steps + 2) * len(rows)
    most = max(rows)
    config = gpu.config(
        model, dtype=gpu.sized("bfloat16", "float32"), max_model_len=context + room, max_num_batched_tokens=2048,
        max_num_seqs=most, num_device_blocks=most * -(-(context + room) // 16), num_host_blocks=0, enforce_eager=enforce_eager,
    )  # fmt: skip
    executor, runtime = gpu.open(config, load=load)
    try:
        driver = Driver(executor)
        draw = random.Random(0)
        seqs = [driver.admit(draw.choices(range(executor.capacity.vocab_size), k=context), room=room) for _ in range(most)]
        driver.prefill(seqs, budget=2048)
        first = driver.decode(seqs, 1).done[0].token_ids
        times = {count: statistics.median(driver.decode(seqs[:count], num_steps).gaps_s) for count in rows}
        return times, first, runtime.num_replays
    finally:
        executor.close()
