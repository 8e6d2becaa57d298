"""Every attention backend that can run, on random paged steps, against float32 SDPA on the same device."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from repertory.gpu.cuda.attention.choice import BACKENDS, Choice, open_attention, why_not
from repertory.gpu.cuda.attention.needs import AttentionNeeds, name_of

from ..batches import Batch, Model, Rows, attend, make_batch, relative_error
from ..gpu import Gpu
from ..report import Report

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Relative, of a token's output. Queries, keys and values are the same on both sides: it is what sums and the format cost."""

FP8 = torch.float8_e4m3fn


class Error(NamedTuple):
    """The worst of some steps, by its relative error; NaN is worse than all."""

    value: float
    rows: Rows


def run(report: Report, gpu: Gpu) -> None:
    """The part: the most usual model first."""
    models = gpu.sized(
        [
            Model(32, 8, 128, 16, torch.bfloat16, torch.bfloat16),
            Model(9, 3, 64, 16, torch.float32, torch.float32),
            Model(32, 8, 128, 256, torch.bfloat16, torch.bfloat16),
            Model(32, 8, 128, 16, torch.bfloat16, FP8),
            Model(9, 3, 64, 16, torch.float16, torch.float16),
            Model(6, 2, 80, 24, torch.bfloat16, torch.bfloat16),
        ],
        [Model(6, 2, 16, 8, torch.float32, torch.float32), Model(4, 4, 24, 6, torch.bfloat16, torch.bfloat16)],
    )
    reasons: dict[str, list[str]] = {name: [] for name in BACKENDS}
    ran: set[str] = set()
    for model in models:
        needs = _needs(gpu, model)
        batches: list[tuple[Rows, Batch]] = []
        for name in BACKENDS:
            if (reason := why_not(name, needs)) is not None:
                reasons[name].append(reason)
                continue
            if not batches:
                batches = [
                    (rows, make_batch(model, rows, device=gpu.device, seed=i)) for i, rows in enumerate(_steps(gpu, model))
                ]
            _check(report, gpu, name, needs, batches)
            ran.add(name)
    for name in BACKENDS:
        if name not in ran:
            report.skip(name, reasons[name][0])
    report.detail("why_not", reasons)


def _steps(gpu: Gpu, model: Model) -> list[Rows]:
    size = model.block_size
    if gpu.is_rehearsal:
        return [Rows([1, 9, 33]), Rows([17], [(5, 5), (7, 30)]), Rows([40, 45, 41], sharing=3, shared=4)]
    return [
        Rows([1]),
        Rows([8191]),  # split over the multiprocessors
        Rows([1, 15, 16, 17, 255, 256, 257, 700, 2049, 33, 64, 5] * 4),
        Rows([], [(1024, 1024)]),
        Rows([], [(300, 2300), (17, 33), (64, 64), (2, 700)]),
        Rows([40, 1300, 999], [(129, 257), (5, 4100)]),
        Rows([size * 4 * (256 // size) + 7 * i + 1 for i in range(32)], sharing=32, shared=4 * (256 // size)),
    ]


def _check(report: Report, gpu: Gpu, name: str, needs: AttentionNeeds, batches: list[tuple[Rows, Batch]]) -> None:
    pool = "" if needs.kv_dtype == needs.dtype else ", float8 pool"
    heads = f"heads {needs.num_heads}/{needs.num_kv_heads} x {needs.head_dim}"
    what = f"{name}, {name_of(needs.dtype)}{pool}, {heads}, block {needs.block_size}"
    tolerance = TOLERANCES[needs.dtype]
    try:
        worst = _worst(gpu, name, needs, batches)
    except Exception as error:  # the next backend may be fine
        report.detail(what, repr(error))
        report.right(what, False, note=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        return
    is_right = worst.value <= tolerance  # not so for NaN
    where = "" if is_right else f"; worst at {worst.rows}"
    note = f"relative error, at most {tolerance:g}, of {len(batches)} steps{where}"
    report.right(what, is_right, value=worst.value, note=note)


def _worst(gpu: Gpu, name: str, needs: AttentionNeeds, batches: list[tuple[Rows, Batch]]) -> Error:
    backend = open_attention(Choice(name, "checked"), needs, max_rows=64, num_sms=gpu.facts.num_multiprocessors)
    errors = [Error(relative_error(attend(backend, batch), batch.expected), rows) for rows, batch in batches]
    return max(errors, key=lambda error: math.inf if math.isnan(error.value) else error.value)


def _needs(gpu: Gpu, model: Model) -> AttentionNeeds:
    return AttentionNeeds(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=model.block_size,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        device=gpu.device,
        capability=gpu.facts.capability,
    )
