"""Steps of attention over pages: pools full of junk, and what the result must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from repertory.gpu.cuda.attention.contract import AttentionBackend, AttentionInputs, PagedKeysValues, SharedRun
from repertory.gpu.cuda.attention.triton_paged import HeadShape, TritonPaged
from repertory.tests.gpu_cuda.paged_batches import attend_plainly

LAYER = 1
NUM_LAYERS = 3
SMALL = HeadShape(3, 1, 16)


class Row(NamedTuple):
    """`num_queries` tokens at the end of a context."""

    num_queries: int
    context: int


class Run(NamedTuple):
    """Rows that share their first `num_blocks` blocks."""

    rows: Sequence[int]
    num_blocks: int


class PagedStep:
    """A step over a block-major pool in which everything that no row may read is NaN or infinite."""

    def __init__(
        self,
        rows: Sequence[Row],
        heads: HeadShape = SMALL,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        pool_dtype: torch.dtype | None = None,
        runs: Sequence[Run] = (),
    ) -> None:
        self.block_size = block_size
        self.heads = heads
        blocks = [-(-row.context // block_size) for row in rows]
        num_tokens = sum(row.num_queries for row in rows)
        self.pool = torch.empty(
            (sum(blocks) + 3, NUM_LAYERS, 2, block_size, heads.num_kv_heads, heads.head_dim), dtype=pool_dtype or dtype
        )
        # A view of the fused projection.
        fused = torch.empty(num_tokens, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, dtype=dtype)
        self.query = fused[:, : heads.num_heads]
        self.cache = PagedKeysValues(self.pool[:, LAYER, 0], self.pool[:, LAYER, 1])
        self._out = torch.empty(num_tokens + 2, heads.num_heads + 1, heads.head_dim, dtype=dtype)
        self.inputs = AttentionInputs(
            block_tables=torch.empty(len(rows), max([0, *blocks]) + 2, dtype=torch.int32),
            context_lens=torch.empty(len(rows), dtype=torch.int32),
            query_starts=torch.empty(len(rows) + 1, dtype=torch.int32),
            num_decodes=sum(row.num_queries == 1 for row in rows),
            num_chunks=sum(row.num_queries > 1 for row in rows),
            num_chunk_tokens=sum(row.num_queries for row in rows if row.num_queries > 1),
            max_query_len=max([0, *(row.num_queries for row in rows if row.num_queries > 1)]),
            max_context_len=max([0, *(row.context for row in rows)]),
            shared_runs=[
                SharedRun(torch.empty(len(run.rows), dtype=torch.int32), len(run.rows), run.num_blocks * block_size)
                for run in runs
            ],
        )
        self.fill(rows, runs, seed=0)

    def fill(self, rows: Sequence[Row], runs: Sequence[Run] = (), *, seed: int) -> None:
        """Put other contents into the same tensors. `rows` and `runs` are as many as before, with as many tokens."""
        generator = torch.Generator().manual_seed(seed)
        inputs = self.inputs
        self.rows = rows
        self.pool.fill_(float("nan"))
        if self.pool.dtype.itemsize > 1:  # float8 has no infinity
            self.pool[1::2].fill_(float("inf"))
        self.query.copy_(torch.randn(self.query.shape, generator=generator))
        inputs.context_lens.copy_(torch.tensor([row.context for row in rows], dtype=torch.int32))
        inputs.query_starts.copy_(torch.tensor([0, *(row.num_queries for row in rows)]).cumsum(0))
        # The padding of tables leads to block 0, which is no row's.
        inputs.block_tables.zero_()
        free = (torch.randperm(len(self.pool) - 1, generator=generator) + 1).tolist()
        for table, row in zip(inputs.block_tables, rows, strict=True):
            blocks = [free.pop() for _ in range(-(-row.context // self.block_size))]
            table[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for run, shared in zip(runs, inputs.shared_runs, strict=True):
            shared.rows.copy_(torch.tensor(run.rows))
            for member in run.rows[1:]:
                inputs.block_tables[member, : run.num_blocks] = inputs.block_tables[run.rows[0], : run.num_blocks]
        for index in range(len(rows)):
            for part in (self.cache.keys, self.cache.values):
                blocks, offsets = self._slots(index)
                shape = (len(blocks), *part.shape[2:])
                part[blocks, offsets] = torch.randn(shape, generator=generator).to(part.dtype)

    def attend(self, backend: AttentionBackend, inputs: AttentionInputs | None = None) -> Tensor:
        """What `backend` computes, in float64: [tokens, num_heads, head_dim]. It must not write beyond."""
        self._out.fill_(7)
        out = self._out[:-2, :-1]
        backend.attend(self.query, self.cache, inputs or self.inputs, out)
        assert (self._out[-2:] == 7).all() and (self._out[:, -1] == 7).all()
        return out.double()

    def expected(self) -> Tensor:
        """Softmax over each row's pages, in float64."""
        rows = self.query.double().split([row.num_queries for row in self.rows])
        results = [self._expected_row(index, query) for index, query in enumerate(rows)]
        return torch.cat([torch.empty(0, *self.query.shape[1:], dtype=torch.float64), *results])

    def _expected_row(self, index: int, query: Tensor) -> Tensor:
        keys = self.cache.keys[self._slots(index)].double() * self.cache.key_scale
        values = self.cache.values[self._slots(index)].double() * self.cache.value_scale
        return attend_plainly(query, keys, values)

    def _slots(self, index: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(self.rows[index].context)
        return self.inputs.block_tables[index, positions // self.block_size].long(), positions % self.block_size


def make_backend(heads: HeadShape = SMALL, *, num_sms: int = 1, sharing_costs_bytes: int = 0) -> TritonPaged:
    """A backend for up to 32 decode rows whose scratch is full of junk, and that shares whatever saves a read."""
    backend = TritonPaged(
        heads, max_rows=32, num_sms=num_sms, device=torch.device("cpu"), sharing_costs_bytes=sharing_costs_bytes
    )
    for tensor in backend._scratch[:3]:
        tensor.fill_(float("nan"))
    backend._scratch.sharing.fill_(2**30)
    return backend
