"""Random steps over a paged pool, and what attention over them must give.

That is float32 SDPA of torch, row by row, on the same device. All of the pool that is in no row's context is NaN, and so is
all of an output before it is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from repertory.gpu.cuda.attention.contract import AttentionBackend, AttentionInputs, PagedKeysValues, SharedRun

FP8_SCALES = (0.05, 0.02)
"""Of keys and values in a float8 pool."""


class Model(NamedTuple):
    """Attention of a model, and its pool."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def is_fp8(self) -> bool:
        """Whether the pool is float8."""
        return self.kv_dtype != self.dtype


class Rows(NamedTuple):
    """A step: contexts of its decode rows, (tokens, context) of its chunks; its first `sharing` rows share `shared` blocks."""

    decodes: Sequence[int]
    chunks: Sequence[tuple[int, int]] = ()
    sharing: int = 0
    shared: int = 0


class Batch(NamedTuple):
    """A step, ready to attend; `expected` is float32 [tokens, num_heads, head_dim]."""

    query: Tensor
    cache: PagedKeysValues
    inputs: AttentionInputs
    expected: Tensor


def make_batch(model: Model, rows: Rows, *, device: torch.device, seed: int) -> Batch:
    """`rows` over the middle layer of a pool, their blocks in random order; queries are a view of a fused projection."""
    generator = torch.Generator(device).manual_seed(seed)
    contexts = [*rows.decodes, *(context for _, context in rows.chunks)]
    lengths = [1] * len(rows.decodes) + [tokens for tokens, _ in rows.chunks]
    tables, num_blocks = _tables(contexts, rows, block_size=model.block_size, seed=seed)
    pool = torch.full((num_blocks, 3, 2, model.block_size, model.num_kv_heads, model.head_dim), torch.nan, device=device)
    scales = FP8_SCALES if model.is_fp8 else (1.0, 1.0)
    for row, context in enumerate(contexts):
        first = rows.shared if 0 < row < rows.sharing else 0  # what is shared is written once
        for column in range(first, -(-context // model.block_size)):
            used = min(model.block_size, context - column * model.block_size)
            pool[tables[row][column], 1, :, :used] = torch.randn(
                2, used, model.num_kv_heads, model.head_dim, generator=generator, device=device
            )
    for part, scale in enumerate(scales):
        pool[:, :, part] /= scale
    stored = pool.to(model.kv_dtype)
    heads = model.num_heads + 2 * model.num_kv_heads
    fused = torch.randn(sum(lengths), heads, model.head_dim, generator=generator, device=device).to(model.dtype)
    query, cache = fused[:, : model.num_heads], PagedKeysValues(stored[:, 1, 0], stored[:, 1, 1], *scales)
    inputs = _inputs(tables, contexts, lengths, rows, device)
    inputs = _with_runs(inputs, rows, model, device)
    return Batch(query, cache, inputs, _expected(query, cache, inputs, lengths))


def attend(backend: AttentionBackend, batch: Batch) -> Tensor:
    """What `backend` writes into an output that was NaN: float32."""
    out = torch.full(batch.query.shape, torch.nan, dtype=batch.query.dtype, device=batch.query.device)
    backend.attend(batch.query, batch.cache, batch.inputs, out)
    return out.float()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| of the token where it is largest; NaN where there is one."""
    differences = (found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return float(differences.max())


def _tables(contexts: Sequence[int], rows: Rows, *, block_size: int, seed: int) -> tuple[list[list[int]], int]:
    needed = [-(-context // block_size) for context in contexts]
    num_blocks = sum(needed) + 3
    free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = [[free.pop() for _ in range(count)] for count in needed]
    for table in tables[1 : rows.sharing]:
        table[: rows.shared] = tables[0][: rows.shared]
    width = max(needed) + 2
    return [table + [0] * (width - len(table)) for table in tables], num_blocks


def _inputs(
    tables: list[list[int]], contexts: list[int], lengths: list[int], rows: Rows, device: torch.device
) -> AttentionInputs:
    def on_device(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return AttentionInputs(
        block_tables=on_device(tables),
        context_lens=on_device(contexts),
        query_starts=on_device([0, *itertools.accumulate(lengths)]),
        num_decodes=len(rows.decodes),
        num_chunks=len(rows.chunks),
        num_chunk_tokens=sum(tokens for tokens, _ in rows.chunks),
        max_query_len=max(lengths),
        max_context_len=max(contexts),
    )


def _with_runs(inputs: AttentionInputs, rows: Rows, model: Model, device: torch.device) -> AttentionInputs:
    if not rows.sharing:
        return inputs
    members = torch.arange(rows.sharing, dtype=torch.int32, device=device)
    run = SharedRun(members, rows.sharing, rows.shared * model.block_size)
    return AttentionInputs(**{name: getattr(inputs, name) for name in AttentionInputs.__slots__} | {"shared_runs": [run]})


def _expected(query: Tensor, cache: PagedKeysValues, inputs: AttentionInputs, lengths: Sequence[int]) -> Tensor:
    expected = torch.empty(query.shape, device=query.device)
    start = 0
    for row, length in enumerate(lengths):
        context = int(inputs.context_lens[row])
        keys, values = (
            pages.float()[inputs.block_tables[row].long()].flatten(0, 1)[:context].transpose(0, 1) * scale
            for pages, scale in ((cache.keys, cache.key_scale), (cache.values, cache.value_scale))
        )
        mine = query[start : start + length].float().transpose(0, 1)
        # Lower right: the last token sees all keys.
        seen = torch.ones(length, context, dtype=torch.bool, device=query.device).tril(context - length)
        group = query.shape[1] // keys.shape[0]
        with sdpa_kernel(SDPBackend.MATH):
            attended = F.scaled_dot_product_attention(
                mine[None],
                keys.repeat_interleave(group, dim=0)[None],
                values.repeat_interleave(group, dim=0)[None],
                attn_mask=seen,
            )
        expected[start : start + length] = attended[0].transpose(0, 1)
        start += length
    return expected
