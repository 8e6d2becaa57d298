"""What lies between the matrix products, in Triton, against the same in torch on the same device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from repertory.gpu.cuda.attention.contract import PagedKeysValues
from repertory.gpu.cuda.glue import Glue, TorchGlue

from ..gpu import Gpu
from ..report import Report
from ..shapes import LLAMA_8B, SMOLLM2, TINY, Shape

EPS = 1e-5
BLOCK_SIZE = 16
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Absolute and relative: a few roundings to the format, angles among them, which one side makes and the other does not."""

Outputs = list[Tensor]
"""What an operation returned and wrote, to be compared one by one."""


class Case(NamedTuple):
    """An operation on random inputs, which are the same each time that it is run."""

    name: str
    run: Callable[[Glue, torch.Generator], Outputs]


def run(report: Report, gpu: Gpu) -> None:
    """The part."""
    if not gpu.facts.has_triton:
        report.skip("glue", "there is no Triton here" + (" (TRITON_INTERPRET=1 interprets it)" if gpu.is_rehearsal else ""))
        return
    from repertory.gpu.cuda.triton_glue import TritonGlue

    ours, theirs = TritonGlue(), TorchGlue()
    for dtype in TOLERANCES:
        shapes = gpu.sized([LLAMA_8B, SMOLLM2], [TINY])
        cases = [case for shape in shapes for case in _cases(gpu, shape, dtype)]
        excess = {case.name: _excess(case, ours, theirs, TOLERANCES[dtype], gpu.device) for case in cases}
        name = max(excess, key=lambda name: excess[name] if excess[name] == excess[name] else float("inf"))
        report.detail(f"{dtype} error over tolerance", excess)
        is_right = all(value <= 1 for value in excess.values())  # not so for NaN
        note = f"error, at most {TOLERANCES[dtype]:g}; furthest: {name}"
        report.right(
            f"norms, rotation, activation in {str(dtype)[6:]}", is_right, value=excess[name] * TOLERANCES[dtype], note=note
        )
    _check_copies(report, gpu, ours, theirs)


def _excess(case: Case, ours: Glue, theirs: Glue, tolerance: float, device: torch.device) -> float:
    """The largest difference of two ways to do it, as a multiple of what is allowed; NaN counts where one side alone has it."""
    pairs = zip(*(case.run(glue, torch.Generator(device).manual_seed(3)) for glue in (ours, theirs)), strict=True)
    return max(_difference(mine, other, tolerance) for mine, other in pairs)


def _difference(mine: Tensor, other: Tensor, tolerance: float) -> float:
    mine, other = mine.float(), other.float()
    difference = (mine - other).abs() / (tolerance * (1 + other.abs()))
    return float(difference.masked_fill(mine.isnan() & other.isnan(), 0.0).nan_to_num(nan=float("inf")).max())


def _cases(gpu: Gpu, shape: Shape, dtype: torch.dtype) -> list[Case]:
    tokens = gpu.sized((1, 33, 2048), (1, 5))

    def random(generator: torch.Generator, *size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=gpu.device).to(dtype)

    def rms_norm(count: int) -> Callable[[Glue, torch.Generator], Outputs]:
        def run(glue: Glue, generator: torch.Generator) -> Outputs:
            return [glue.rms_norm(random(generator, count, shape.hidden), random(generator, shape.hidden), EPS)]

        return run

    def add_rms_norm(count: int) -> Callable[[Glue, torch.Generator], Outputs]:
        def run(glue: Glue, generator: torch.Generator) -> Outputs:
            x, residual = random(generator, count, shape.hidden), random(generator, count, shape.hidden)
            return [glue.add_rms_norm(x, residual, random(generator, shape.hidden), EPS), residual]

        return run

    def silu_mul(count: int) -> Callable[[Glue, torch.Generator], Outputs]:
        return lambda glue, generator: [glue.silu_mul(random(generator, count, 2 * shape.intermediate))]

    def rope(count: int) -> Callable[[Glue, torch.Generator], Outputs]:
        return lambda glue, generator: _rotate(
            glue, shape, random(generator, count, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        )

    kinds = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "silu_mul": silu_mul, "rope_and_write": rope}
    return [Case(f"{name} {count} x {shape.hidden}", make(count)) for name, make in kinds.items() for count in tokens]


def _rotate(glue: Glue, shape: Shape, fused: Tensor) -> Outputs:
    """Queries turned, keys and values in a pool of NaN; every seventh token has nowhere to be written."""
    count, device = len(fused), fused.device
    num_blocks = count // BLOCK_SIZE + 2
    pool = torch.full(
        (num_blocks, 2, 2, BLOCK_SIZE, shape.kv_heads, shape.head_dim), torch.nan, dtype=fused.dtype, device=device
    )
    query, key, value = torch.split(fused, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    places = torch.randperm(num_blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(5))[:count]
    slots = torch.where(torch.arange(count) % 7 == 3, -1, places).to(device)
    positions = torch.arange(count, device=device) * 3 % 4096
    frequencies = 10_000.0 ** -(torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
    angles = torch.arange(4096, device=device)[:, None] * frequencies
    glue.rope_and_write(
        query, key, value, positions=positions, cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1), slots=slots,
        cache=PagedKeysValues(pool[:, 1, 0], pool[:, 1, 1]),
    )  # fmt: skip
    return [query, pool]


def _check_copies(report: Report, gpu: Gpu, ours: Glue, theirs: Glue) -> None:
    shape = gpu.sized(LLAMA_8B, TINY)
    size = (64, shape.layers, 2, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    pool = torch.randn(size, device=gpu.device).bfloat16()
    order = torch.randperm(64, device=gpu.device)
    sources, targets, counts = order[:20], order[20:40], torch.arange(20, device=gpu.device) % (BLOCK_SIZE + 1)
    staged = torch.randn(20, *size[1:], device=gpu.device).bfloat16()
    found = []
    for glue in (ours, theirs):
        mine, gathered = pool.clone(), torch.zeros_like(staged)
        glue.copy_slots(mine, sources, targets, counts)
        glue.gather_blocks(mine, targets, gathered)
        glue.scatter_blocks(mine, order[40:60], staged)
        found.append((mine, gathered))
    is_same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*found, strict=True))
    report.right("slots and blocks copied within the pool", is_same, note="bit for bit")
