"""The C kernels one by one, on torch tensors, and what they must compute, in float64."""

from __future__ import annotations

import ctypes
import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from repertory.gpu.cpu import library as lib
from repertory.gpu.cpu.packing import rounded_up

PLAIN, ADD, SILU_MUL, LOGITS = range(4)

try:
    LIBRARY = lib.open_library()
except lib.KernelsUnavailableError as reason:
    pytest.skip(str(reason), allow_module_level=True)

KERNELS = [
    pytest.param((level, dtype), id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for level, name in enumerate(lib.LEVELS)
    for dtype in (torch.float32, torch.bfloat16)
    if LIBRARY.has_kernels(level, dtype is torch.bfloat16)
]
"""Every level and element that this machine can run: (level, dtype)."""

Kernel = tuple[int, torch.dtype]


def assert_near(found: Tensor, expected: Tensor, *, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Equal but for the roundings of a computation that holds its values in `dtype`."""
    absolute, relative = (2e-2, 1e-2) if dtype is torch.bfloat16 else (2e-5, 1e-5)
    torch.testing.assert_close(found.double(), expected.double(), atol=factor * absolute, rtol=relative)


def scratch(size: int = 1 << 21) -> Tensor:
    """Scratch memory, aligned as the executor's is, full of NaN."""
    memory = torch.full((size // 4 + 1024,), float("nan"))
    return memory[-memory.data_ptr() % 4096 // 4 :]


def pack(kernel: Kernel, weights: Tensor, *, interleave: bool = False) -> Tensor:
    level, dtype = kernel
    n, k = weights.shape
    packed = torch.full((rounded_up(n, LIBRARY.panel_columns(level, dtype is torch.bfloat16)) * k,), float("nan"), dtype=dtype)
    LIBRARY.pack(level, dtype is torch.bfloat16, weights.data_ptr(), packed.data_ptr(), n, k, interleave)
    return packed


def linear(kernel: Kernel, x: Tensor, weights: Tensor, y: Tensor, epilogue: int) -> None:
    """Run a linear layer on rows `x`, into `y`, which may have more columns and rows than the result."""
    level, dtype = kernel
    packed = pack(kernel, weights, interleave=epilogue == SILU_MUL)
    padded = torch.zeros(rounded_up(len(x), 32), x.shape[1], dtype=dtype)
    padded[: len(x)] = x
    memory = scratch()
    call = lib.Linear(
        padded.data_ptr(), padded.stride(0), len(x), packed.data_ptr(), *weights.shape, y.data_ptr(), y.stride(0), epilogue
    )
    LIBRARY.run_linear(level, dtype is torch.bfloat16, ctypes.byref(call), memory.data_ptr())


@dataclass
class Pool:
    """One layer's keys and values in scattered blocks, the rest NaN, and queries beside them."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    """[tokens, num_heads * head_dim], a view with a stride of its own."""
    num_heads: int

    @classmethod
    def make(
        cls,
        dtype: torch.dtype,
        *,
        tokens: int,
        num_blocks: int,
        block_size: int = 16,
        heads: int = 3,
        kv_heads: int = 1,
        head_dim: int = 64,
    ) -> Pool:
        shape = (num_blocks, 2, 2, block_size, kv_heads, head_dim)  # two layers, so that blocks are strided
        pool = torch.full(shape, float("nan"), dtype=dtype)
        queries = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
        return cls(pool[:, 1, 0], pool[:, 1, 1], queries[:, : heads * head_dim], heads)

    def fill(self, context: int, blocks: list[int]) -> list[int]:
        """Write `context` random tokens into `blocks` and return these."""
        size = self.keys.shape[1]
        for t in range(context):
            for side in (self.keys, self.values):
                side[blocks[t // size], t % size] = torch.randn(side.shape[2:]).to(side.dtype)
        return blocks

    def attention(self, output: Tensor, state: Tensor | None = None) -> lib.Attention:
        return lib.Attention(
            self.keys.data_ptr(),
            self.values.data_ptr(),
            self.keys.shape[1],
            self.keys.stride(0),
            self.keys.stride(1),
            self.num_heads,
            self.keys.shape[2],
            self.keys.shape[3],
            self.queries.data_ptr(),
            self.queries.stride(0),
            output.data_ptr(),
            state.data_ptr() if state is not None else None,
        )

    def expected(self, token: int, table: list[int], context: int) -> Tensor:
        """[num_heads * head_dim] in float64: one query against its first `context` keys."""
        size, kv_heads, dim = self.keys.shape[1:]
        places = [(table[t // size], t % size) for t in range(context)]
        key, value = (torch.stack([side[place] for place in places]).double() for side in (self.keys, self.values))
        query = self.queries[token].double().view(kv_heads, -1, dim)
        weights = (torch.einsum("hgd,thd->hgt", query, key) / math.sqrt(dim)).softmax(-1)
        return torch.einsum("hgt,thd->hgd", weights, value).flatten()


def attend_decodes(
    kernel: Kernel, pool: Pool, rows: list[tuple[int, int, int, list[int]]], state: Tensor | None = None
) -> Tensor:
    """`rows` are (token, context, shared, block table). Returns [tokens, num_heads * head_dim]."""
    level, dtype = kernel
    tables = np.array([block for *_, table in rows for block in table], dtype=np.int32)
    starts = np.cumsum([0, *(len(table) for *_, table in rows)])
    decodes = np.array(
        [(token, context, shared, start) for (token, context, shared, _), start in zip(rows, starts, strict=False)], np.int32
    )
    output = torch.full(pool.queries.shape, float("nan"), dtype=dtype)
    memory = scratch()
    LIBRARY.run_attend_decodes(
        level,
        dtype is torch.bfloat16,
        ctypes.byref(pool.attention(output, state)),
        tables.ctypes.data,
        decodes.ctypes.data,
        len(rows),
        memory.data_ptr(),
    )
    return output


def attend_chunk(kernel: Kernel, pool: Pool, *, token: int, count: int, context: int, table: list[int]) -> Tensor:
    """The last `count` of `context` tokens, at `token` in the step. Returns [tokens, num_heads * head_dim]."""
    output = torch.full(pool.queries.shape, float("nan"), dtype=kernel[1])
    blocks = np.array(table, dtype=np.int32)
    for kv_head in range(pool.keys.shape[2]):
        run = lib.Run(table=blocks.ctypes.data, keys=context, num_tokens=count, token=token, kv_head=kv_head)
        run.first_limit = context - count + 1
        run.last_query = count * pool.num_heads // pool.keys.shape[2]
        _attend_run(kernel, pool.attention(output), run)
    return output


def attend_group(kernel: Kernel, pool: Pool, *, tokens: list[int], keys: int, table: list[int]) -> Tensor:
    """States of the decode rows at `tokens` after their first `keys` shared keys: [rows, num_heads, head_dim + 16]."""
    dim = pool.keys.shape[3]
    state = torch.full((len(tokens), pool.num_heads, dim + lib.STATE_EXTRA), float("nan"))
    blocks = np.array(table, dtype=np.int32)
    decodes = np.array([(token, keys + 1, keys, 0) for token in tokens], dtype=np.int32)
    members = np.arange(len(tokens), dtype=np.int32)
    for kv_head in range(pool.keys.shape[2]):
        run = lib.Run(table=blocks.ctypes.data, keys=keys, num_tokens=len(tokens), kv_head=kv_head)
        run.members, run.decodes = members.ctypes.data, decodes.ctypes.data
        run.last_query = len(tokens) * pool.num_heads // pool.keys.shape[2]
        _attend_run(kernel, pool.attention(torch.empty(0), state), run)
    return state


def _attend_run(kernel: Kernel, attention: lib.Attention, run: lib.Run) -> None:
    memory = scratch()
    LIBRARY.run_attend_run(
        kernel[0], kernel[1] is torch.bfloat16, ctypes.byref(attention), ctypes.byref(run), memory.data_ptr()
    )


def scattered(count: int, seed: int = 0) -> list[int]:
    """The numbers below `count`, in random order: blocks for tables."""
    return random.Random(seed).sample(range(count), count)
