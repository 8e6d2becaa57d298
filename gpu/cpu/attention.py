"""Attention over KV pages with torch's own kernel: gather a row's pages, attend, next row.

Row by row on purpose. A row gathers exactly its context and nothing else: no padding, so nothing
that another sequence left in a block - a NaN of a failed row included - can reach it, and what it
computes does not depend on its neighbours. Gathering decode rows into padded groups was at most 1.5
times as fast, on short contexts, and lost on long ones. Gathering is under 4% of a chunk's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..slots import Row
from .pool import KvPool


class _RowPlan(NamedTuple):
    """What a row needs in every layer. `mask` is None where no mask or the plain causal one will do."""

    first: int
    last: int
    table: Tensor
    context: int
    mask: Tensor | None
    is_causal: bool


class PagedAttention:
    """`StepAttention` for the rows of one step, over a pool.

    Raises `ValueError` for a row whose block table does not reach its end.
    """

    def __init__(self, pool: KvPool, rows: Sequence[Row]) -> None:
        self._pool = pool
        blocks: list[int] = []
        offsets: list[int] = []
        self._rows: list[_RowPlan] = []
        for row in rows:
            table, size = row.slot.block_table, pool.block_size
            needed = -(-row.end // size)
            if len(table) < needed:
                raise ValueError(f"sequence {row.slot.seq_id}: {len(table)} blocks for a row that ends at token {row.end}")
            self._rows.append(_plan(row, first=len(blocks), num_blocks=needed, dtype=pool.blocks.dtype))
            blocks += [table[position // size] for position in range(row.start, row.end)]
            offsets += [position % size for position in range(row.start, row.end)]
        self._slots = (torch.tensor(blocks), torch.tensor(offsets))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write all rows' keys and values, then attend row by row. Returns [tokens, num_heads * head_dim]."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        keys.index_put_(self._slots, key)
        values.index_put_(self._slots, value)
        attended = torch.empty(query.shape, dtype=query.dtype)
        for row in self._rows:
            output = F.scaled_dot_product_attention(
                _by_head(query[row.first : row.last]),
                _by_head(keys.index_select(0, row.table).flatten(0, 1)[: row.context]),
                _by_head(values.index_select(0, row.table).flatten(0, 1)[: row.context]),
                attn_mask=row.mask,
                is_causal=row.is_causal,
                enable_gqa=True,
            )
            attended[row.first : row.last] = output[0].transpose(0, 1)
        return attended.flatten(1)


def _plan(row: Row, *, first: int, num_blocks: int, dtype: torch.dtype) -> _RowPlan:
    length = row.end - row.start
    is_first_chunk = row.start == 0
    mask = None
    if length > 1 and not is_first_chunk:
        # Lower right: token i of the chunk sees the `start` tokens before the chunk and i + 1 of its own.
        mask = torch.full((length, row.end), float("-inf"), dtype=dtype).triu_(row.start + 1)
    return _RowPlan(
        first=first,
        last=first + length,
        table=torch.tensor(row.slot.block_table[:num_blocks]),
        context=row.end,
        mask=mask,
        is_causal=is_first_chunk and length > 1,
    )


def _by_head(tokens: Tensor) -> Tensor:
    """[tokens, heads, head_dim] as the kernel wants it: [1, heads, tokens, head_dim], a view."""
    return tokens.transpose(0, 1).unsqueeze(0)
