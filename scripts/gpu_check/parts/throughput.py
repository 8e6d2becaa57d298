"""Prefill and decode of a Llama-8B shape in bfloat16, random weights, against what the device can do at best.

decode    floor: the bytes of all weights that are read and of all keys and values, over the device's measured bandwidth
prefill   floor: the operations of all matrix products and of attention, over its measured rate of products
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from repertory.gpu.models.config import ModelConfig, load_model_config
from repertory.protocol.ids import SequenceId

from ..ceilings import Ceilings, measure_ceilings
from ..driving import Driver
from ..gpu import Gpu
from ..report import Report
from ..shapes import LLAMA_8B, TINY, RandomWeights, write_model

MOST_OVER_FLOOR = 1.3
JUDGED_ROWS = 32
CONTEXT, ROOM = 1024, 128
NUM_STEPS = 24
BUDGET = 8192


class Work(NamedTuple):
    """What a model costs: elements of its layers' matrices and of its head, and bytes of a token's keys and values."""

    layers: int
    head: int
    kv_bytes: int
    attention: int
    """Multiply-adds, scores and values, of a token and one of its keys, over all layers."""
    layer_bytes: int
    """Of an element of a layer's matrix."""
    head_bytes: int

    def decode_bytes(self, rows: int, context: float) -> float:
        """What a decode step reads."""
        return self.layers * self.layer_bytes + self.head * self.head_bytes + rows * context * self.kv_bytes

    def prefill_operations(self, num_tokens: int, context: int) -> float:
        """Of prompts of `context` tokens, `num_tokens` together; the head works for the last token of each."""
        products = self.layers * num_tokens + self.head * num_tokens / context
        return 2 * (products + self.attention * num_tokens * (context + 1) / 2)


def run(report: Report, gpu: Gpu) -> None:
    """The part."""
    ceilings = measure_ceilings(gpu)
    report.figure("device memory", ceilings.memory / 1e9, "GB/s", note="the better of a large copy and a large sum")
    report.figure("bfloat16 products", ceilings.matrices / 1e12, "TFLOP/s", note="8192 x 8192 x 8192")
    rows, context, room = gpu.sized(([1, 32, 128], CONTEXT, ROOM), ([1, 3], 24, 40))
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), gpu.sized(LLAMA_8B, TINY), weights=False)
        work = work_of(load_model_config(model), element_bytes=2)
        config = gpu.config(
            model, dtype="bfloat16", max_model_len=context + room, max_num_batched_tokens=gpu.sized(BUDGET, 64),
            max_num_seqs=max(rows), num_device_blocks=max(rows) * -(-(context + room) // 16), num_host_blocks=0,
        )  # fmt: skip
        executor, runtime = gpu.open(config, load=RandomWeights())
    try:
        report.say(f"opened: {executor.capacity.device}")
        report.detail("device", executor.capacity.device)
        driver = Driver(executor)
        draw = random.Random(0)
        seqs = [driver.admit(draw.choices(range(executor.capacity.vocab_size), k=context), room=room) for _ in range(max(rows))]
        _measure_prefill(report, gpu, driver, seqs, work, ceilings)
        for count in rows:
            _measure_decode(report, gpu, driver, seqs[:count], work, ceilings)
        report.detail("replayed_steps", runtime.num_replays)
    finally:
        executor.close()


def work_of(model: ModelConfig, *, element_bytes: int) -> Work:
    """The work of a model whose weights and KV have elements of so many bytes."""
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    attended = model.num_heads * model.head_dim
    layer = model.hidden_size * (qkv + attended + 3 * model.intermediate_size)
    return Work(
        layers=model.num_layers * layer,
        head=model.vocab_size * model.hidden_size,
        kv_bytes=2 * model.num_layers * model.num_kv_heads * model.head_dim * element_bytes,
        attention=2 * model.num_layers * attended,
        layer_bytes=element_bytes,
        head_bytes=element_bytes,
    )


def _measure_prefill(report: Report, gpu: Gpu, driver: Driver, seqs: list[SequenceId], work: Work, ceilings: Ceilings) -> None:
    """Prompts of all sequences, in steps of two sizes; what is slow for the first time is not counted."""
    halves = [seqs[: len(seqs) // 2], seqs[len(seqs) // 2 :]]
    for budget, half in zip(gpu.sized((BUDGET, 2048), (64, 32)), halves, strict=True):
        warm, counted = half[: max(1, len(half) // 8)], half[max(1, len(half) // 8) :] or half
        lengths = [driver.length(seq_id) for seq_id in half]
        driver.prefill(warm, budget=budget)
        if counted is half:
            continue  # a rehearsal has no more than one
        num_tokens = lengths[0] * len(counted)
        seconds = driver.prefill(counted, budget=budget).seconds
        floor_s = work.prefill_operations(num_tokens, lengths[0]) / ceilings.matrices
        note = f"{seconds / floor_s:.2f} times the floor of {num_tokens / floor_s:,.0f}"
        report.figure(f"prefill, {budget:,} tokens a step", num_tokens / seconds, "tok/s", note=note)


def _measure_decode(report: Report, gpu: Gpu, driver: Driver, seqs: list[SequenceId], work: Work, ceilings: Ceilings) -> None:
    num_steps = gpu.sized(NUM_STEPS, 3)
    driver.decode(seqs, gpu.sized(4, 1))
    context = statistics.fmean(driver.length(seq_id) for seq_id in seqs) + num_steps / 2
    ran = driver.decode(seqs, num_steps)
    step_s, device_s = statistics.median(ran.gaps_s), statistics.median(done.seconds for done in ran.done)
    floor_s = work.decode_bytes(len(seqs), context) / ceilings.memory
    what = f"decode, {len(seqs)} rows: over the bandwidth floor"
    took = f"{step_s * 1e3:.3g} ms a step ({device_s * 1e3:.3g} on the device)"
    note = f"{took}, {len(seqs) / step_s:,.0f} tok/s; floor {floor_s * 1e3:.3g} ms"
    if len(seqs) == JUDGED_ROWS:
        report.at_most(what, step_s / floor_s, "x", MOST_OVER_FLOOR, note=note)
    else:
        report.figure(what, step_s / floor_s, "x", note=note)
