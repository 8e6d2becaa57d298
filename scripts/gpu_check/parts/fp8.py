"""float8 weights and KV: products against their reference on the same device, what they change of a model, what they gain.

products   `_scaled_mm` and the quantising kernel against the same in float32; what differs is rounding of the result
changes    log-probabilities, teacher-forced, against plain torch in float32 on a model with random weights
gains      decode steps of a Llama-8B shape, over the bytes that they read
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from repertory.gpu.cuda.fp8 import fp8_maker, why_no_fp8
from repertory.gpu.models.config import load_model_config

from ..ceilings import measure_ceilings
from ..driving import Driver
from ..forcing import by_chunks, by_decodes, compared, with_blocks
from ..gpu import Gpu
from ..plain import PlainLlama
from ..report import Report
from ..shapes import LLAMA_8B, TINY, RandomWeights, write_model, write_tame
from .throughput import work_of

SETTINGS: dict[str, dict[str, Any]] = {
    "weights": {"quantization": "fp8"},
    "KV": {"kv_cache_dtype": "fp8"},
    "weights and KV": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}

PRODUCT_TOLERANCE = 1e-2
"""Relative, of a whole result: it is rounded to bfloat16 twice, and a GPU's sums have fewer bits than float32's."""

MOST_CHANGED = 0.5
"""Mean of the log-probabilities' differences, whose own spread is near 1: far beyond what rounding to 3 bits does."""


def run(report: Report, gpu: Gpu) -> None:
    """The part."""
    if (reason := why_no_fp8(gpu.facts.capability)) is not None:
        report.skip("fp8", reason)
        return
    _check_products(report, gpu)
    _check_changes(report, gpu)
    _measure_gains(report, gpu)


def _check_products(report: Report, gpu: Gpu) -> None:
    ours = fp8_maker(is_gpu=not gpu.is_rehearsal, has_triton=gpu.facts.has_triton)
    theirs = fp8_maker(is_gpu=False, has_triton=False)
    worst = 0.0
    for out_features, in_features in gpu.sized([(6144, 4096), (4096, 14_336), (960, 576)], [(64, 32)]):
        weight = torch.randn(out_features, in_features, device=gpu.device).mul_(0.02).bfloat16()
        mine, other = ours(weight, None), theirs(weight, None)
        for rows in gpu.sized((1, 5, 32, 2048), (1, 5)):
            x = torch.randn(rows, in_features, device=gpu.device).bfloat16()
            expected = other(x).float()
            worst = max(worst, float((mine(x).float() - expected).norm() / expected.norm()))
    note = f"relative error, at most {PRODUCT_TOLERANCE:g}"
    report.right("products against float32 of the same elements", worst <= PRODUCT_TOLERANCE, value=worst, note=note)


def _check_changes(report: Report, gpu: Gpu) -> None:
    num_texts, length = gpu.sized((8, 96), (2, 24))
    with tempfile.TemporaryDirectory() as folder:
        model, vocab_size = write_tame(gpu, Path(folder))
        texts = [random.Random(number).choices(range(3, vocab_size), k=length) for number in range(num_texts)]
        exact = PlainLlama(model, device=gpu.device).logits(texts).log_softmax(-1)
        for name, settings in SETTINGS.items():
            config = gpu.config(
                model, dtype="bfloat16", max_model_len=256, max_num_batched_tokens=256, max_num_seqs=8, num_device_blocks=256,
                num_host_blocks=0, enforce_eager=True, **settings,
            )  # fmt: skip
            executor, _ = gpu.open(config)
            try:
                driver = Driver(executor)
                placed = with_blocks(driver, texts)
                found = [by_chunks(driver, placed), by_decodes(driver, placed)]
            finally:
                executor.close()
            results = [compared(entries, exact) for entries in found]
            mean = max(result.mean for result in results)
            note = f"mean, at most {MOST_CHANGED:g}; argmaxes equal {', '.join(f'{one.agreement:.0%}' for one in results)}"
            report.right(f"{name}: log-probabilities from float32 by", mean <= MOST_CHANGED, value=mean, note=note)


def _measure_gains(report: Report, gpu: Gpu) -> None:
    memory = measure_ceilings(gpu).memory
    rows, context, num_steps = gpu.sized((32, 1024, 24), (3, 24, 3))
    room = num_steps + 8
    load = RandomWeights()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), gpu.sized(LLAMA_8B, TINY), weights=False)
        for name, settings in {"bfloat16": {}, **SETTINGS}.items():
            config = gpu.config(
                model, dtype="bfloat16", max_model_len=context + room, max_num_batched_tokens=2048, max_num_seqs=rows,
                num_device_blocks=rows * -(-(context + room) // 16), num_host_blocks=0, **settings,
            )  # fmt: skip
            executor, _ = gpu.open(config, load=load)
            try:
                driver = Driver(executor)
                draw = random.Random(0)
                vocab_size = executor.capacity.vocab_size
                seqs = [driver.admit(draw.choices(range(vocab_size), k=context), room=room) for _ in range(rows)]
                driver.prefill(seqs, budget=2048)
                driver.decode(seqs, 4)
                step_s = statistics.median(driver.decode(seqs, num_steps).gaps_s)
            finally:
                executor.close()
            work = work_of(load_model_config(model), element_bytes=2)
            work = work._replace(
                layer_bytes=1 if "quantization" in settings else 2,
                kv_bytes=work.kv_bytes // (2 if "kv_cache_dtype" in settings else 1),
            )
            floor_s = work.decode_bytes(rows, context + num_steps / 2) / memory
            note = f"{step_s / floor_s:.2f} times the floor of {floor_s * 1e3:.3g} ms"
            shape = gpu.sized("Llama-8B", "tiny")
            report.figure(f"{shape}, a decode step of {rows} rows, {name}", step_s * 1e3, "ms", note=note)
