"""Draws in Triton against the reference on the same device: the same tokens, of rows with every kind of parameters at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from repertory.gpu.cuda.draws import Column, DeviceSampler, DrawParameters, Status, TorchSampler, TritonSampler
from repertory.gpu.sampling import SamplingRow
from repertory.protocol.sampling import SamplingParams

from ..gpu import Gpu
from ..report import Report

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 50},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"min_p": 0.1},
    {"temperature": 5.0, "top_p": 0.99},
    {"temperature": 2.0, "top_k": 20_000},
)

MOST_ON_THE_BORDER = 2e-3
"""Share of random draws that may be another token: sums in another order part where a draw falls between two of them."""


def run(report: Report, gpu: Gpu) -> None:
    """The part."""
    if not gpu.facts.has_triton:
        report.skip("sampling", "there is no Triton here" + (" (TRITON_INTERPRET=1 interprets it)" if gpu.is_rehearsal else ""))
        return
    sizes = gpu.sized([(128_256, torch.bfloat16), (49_152, torch.float32), (151_936, torch.float16)], [(500, torch.float32)])
    for vocab_size, dtype in sizes:
        _check(report, gpu, vocab_size, dtype)


def _check(report: Report, gpu: Gpu, vocab_size: int, dtype: torch.dtype) -> None:
    num_rows, rounds = gpu.sized((256, 4), (8, 1))
    sampler = TritonSampler(max_rows=num_rows, vocab_size=vocab_size, device=gpu.device)
    parted = unequal_greedy = random_draws = 0
    are_statuses_right = True
    for number in range(rounds):
        rows = _rows(num_rows, number)
        logits = _logits(gpu, num_rows, vocab_size, seed=number).to(dtype)
        table = torch.zeros((len(Column), num_rows), dtype=torch.int64)
        DrawParameters(table).write(rows)
        table = table.to(gpu.device)
        tokens, statuses = _draw(sampler, logits, table)
        expected, expected_statuses = _draw(TorchSampler(), logits, table)
        is_random = torch.tensor([row.params.temperature > 0 for row in rows])
        differs = tokens != expected
        parted += int((differs & is_random).sum())
        unequal_greedy += int((differs & ~is_random).sum())
        random_draws += int(is_random.sum())
        are_statuses_right &= torch.equal(statuses, expected_statuses) and int((statuses == Status.NOT_FINITE).sum()) == 1
    is_right = are_statuses_right and not unequal_greedy and parted <= MOST_ON_THE_BORDER * random_draws
    note = f"{parted} of {random_draws} random and {unequal_greedy} greedy draws differ"
    note += "" if are_statuses_right else "; statuses differ"
    report.right(
        f"draws from {vocab_size:,} {str(dtype)[6:]} logits", is_right, value=num_rows * rounds, unit="rows", note=note
    )


def _rows(count: int, number: int) -> list[SamplingRow]:
    return [
        SamplingRow(SamplingParams(**{"temperature": 1.0, **KINDS[i % len(KINDS)]}, seed=1000 * number + i), i % 3, i * 7)
        for i in range(count)
    ]


def _logits(gpu: Gpu, num_rows: int, vocab_size: int, *, seed: int) -> Tensor:
    """As models make them: a few tokens stand out. Some tokens are masked, and one row is not finite."""
    generator = torch.Generator(gpu.device).manual_seed(seed)
    logits = 2.5 * torch.randn(num_rows, vocab_size, generator=generator, device=gpu.device)
    logits[:, : vocab_size // 50] += 6.0
    logits[1, ::3] = float("-inf")
    logits[-1, vocab_size // 2] = float("nan")
    return logits


def _draw(sampler: DeviceSampler, logits: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    tokens, statuses = (torch.full((len(logits),), -7, dtype=torch.int32, device=logits.device) for _ in range(2))
    sampler.draw(logits, table, num_rows=len(logits), tokens=tokens, statuses=statuses)
    return tokens.cpu(), statuses.cpu()
