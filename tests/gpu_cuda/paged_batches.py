"""Steps over a paged pool for tests of attention, and what comes out of them, computed plainly in float64.

All of a pool that is in no row's context is NaN; all of an output is NaN before it is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repertory.gpu.cuda.attention.contract import AttentionBackend, AttentionInputs, PagedKeysValues
from repertory.gpu.cuda.attention.needs import AttentionNeeds


@dataclass(frozen=True)
class Heads:
    """Shape of a model's attention."""

    query: int
    kv: int
    dim: int


SMALL = Heads(query=6, kv=2, dim=32)


@dataclass(frozen=True)
class PagedBatch:
    """A step, and what attention over it must give: float64 [tokens, heads, head_dim]."""

    query: Tensor
    cache: PagedKeysValues
    inputs: AttentionInputs
    expected: Tensor


def make_batch(
    decodes: Sequence[int],
    chunks: Sequence[tuple[int, int]],
    *,
    block_size: int,
    heads: Heads = SMALL,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    spare_columns: int = 0,
    slack: int = 0,
) -> PagedBatch:
    """Decode rows with these contexts, chunks of these (tokens, context), over the second layer of a block-major pool.

    Queries are a view of a fused projection. Blocks are spread over the pool at random. `spare_columns` widen the tables
    beyond need; `slack` is added to the bounds.
    """
    generator = torch.Generator().manual_seed(17)
    contexts = [*decodes, *(context for _, context in chunks)]
    lengths = [1] * len(decodes) + [tokens for tokens, _ in chunks]
    tables, pool = _filled_pool(contexts, block_size, heads, generator)
    if spare_columns:
        tables = torch.nn.functional.pad(tables, (0, spare_columns))
    pool = pool.to(kv_dtype or dtype)
    scales = (0.5, 0.25) if kv_dtype not in (None, dtype) else (1.0, 1.0)
    fused = torch.randn(sum(lengths), heads.query + 2 * heads.kv, heads.dim, generator=generator).to(dtype)
    inputs = AttentionInputs(
        block_tables=tables,
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        query_starts=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        num_decodes=len(decodes),
        num_chunks=len(chunks),
        num_chunk_tokens=sum(tokens for tokens, _ in chunks),
        max_query_len=max((tokens for tokens, _ in chunks), default=1) + slack,
        max_context_len=max(contexts, default=1) + slack,
    )
    cache = PagedKeysValues(pool[:, 1, 0], pool[:, 1, 1], *scales)
    query = fused[:, : heads.query]
    return PagedBatch(query, cache, inputs, expected_of(query, cache, inputs))


def expected_of(query: Tensor, cache: PagedKeysValues, inputs: AttentionInputs) -> Tensor:
    """What attention must give: float64 [tokens, heads, head_dim]."""
    expected = torch.zeros(query.shape, dtype=torch.float64)
    starts = inputs.query_starts.tolist()
    for row, context in enumerate(inputs.context_lens.tolist()):
        keys = gathered(cache.keys, inputs.block_tables[row], context).double() * cache.key_scale
        values = gathered(cache.values, inputs.block_tables[row], context).double() * cache.value_scale
        tokens = slice(starts[row], starts[row + 1])
        expected[tokens] = attend_plainly(query[tokens].double(), keys, values)
    return expected


def _filled_pool(contexts: Sequence[int], block_size: int, heads: Heads, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Block tables, and a float32 pool of two layers that holds numbers in these contexts' slots of the second."""
    needed = [-(-context // block_size) for context in contexts]
    num_blocks = sum(needed) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.zeros(len(contexts), max(needed, default=1), dtype=torch.int32)
    pool = torch.full((num_blocks, 2, 2, block_size, heads.kv, heads.dim), torch.nan)
    for row, context in enumerate(contexts):
        for column, first in enumerate(range(0, context, block_size)):
            block = tables[row, column] = free.pop()
            used = min(block_size, context - first)
            pool[block, 1, :, :used] = torch.randn(2, used, heads.kv, heads.dim, generator=generator)
    return tables, pool


def gathered(pages: Tensor, table: Tensor, context: int) -> Tensor:
    """The first `context` tokens of the pages in `table`: [context, num_kv_heads, head_dim]."""
    num_pages = -(-context // pages.shape[1])
    stored = torch.stack([pages[int(page)] for page in table[:num_pages]])
    return stored.flatten(0, 1)[:context]


def attend_plainly(query: Tensor, keys: Tensor, values: Tensor, *, is_causal: bool = True) -> Tensor:
    """Softmax of the scaled products, the last query seeing all keys, in the dtype of `query` [tokens, heads, head_dim]."""
    repeats = query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(repeats, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[-1] ** -0.5
    if is_causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)


def attend_with(backend: AttentionBackend, batch: PagedBatch) -> Tensor:
    """What `backend` writes into an output that was NaN."""
    out = torch.full_like(batch.query, torch.nan)
    backend.attend(batch.query, batch.cache, batch.inputs, out)
    return out


def assert_right(backend: AttentionBackend, batch: PagedBatch, *, tolerance: float) -> None:
    """`backend` gives what is expected for `batch`, up to `tolerance`, absolute and relative."""
    torch.testing.assert_close(attend_with(backend, batch).double(), batch.expected, atol=tolerance, rtol=tolerance)


def make_needs(
    *,
    heads: Heads = SMALL,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    capability: tuple[int, int] | None = (9, 0),
) -> AttentionNeeds:
    """What an executor on an H200 would need; computed on the CPU."""
    return AttentionNeeds(
        num_heads=heads.query,
        num_kv_heads=heads.kv,
        head_dim=heads.dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        device=torch.device("cpu"),
        capability=capability,
    )
