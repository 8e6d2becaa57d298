"""What a step asks of attention, and what a way to compute it promises.

The rows of a step lie one behind the other: first the decode rows, one query token each, then the chunks. By the time
that attention runs, the keys and values of all rows of the step are in the pool; it only reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Decode rows whose block tables begin with the same blocks, of which each row has at least one token beyond.

    `rows` int32 [members], indices of decode rows, on the device; `num_keys` is a multiple of the block size.
    """

    rows: Tensor
    num_members: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """A step as attention sees it. Tensors are on the device, counts on the host.

    `block_tables` is int32 [rows, width], rows of it padded with 0; `context_lens` int32 [rows] counts the keys of each
    row, its own tokens included; `query_starts` int32 [rows + 1] says where each row's tokens begin. Token i of a chunk
    of n tokens with c keys sees keys [0, c - n + i]. `max_query_len` and `max_context_len` are upper bounds, of the chunks'
    query tokens and of all rows' keys. In a captured graph, which is replayed with other contents, they bound every step
    that may come. A row of a captured graph that nobody needs has a context of 1.
    `shared_runs` may be ignored; a row is in one at most.
    """

    block_tables: Tensor
    context_lens: Tensor
    query_starts: Tensor
    num_decodes: int
    num_chunks: int
    num_chunk_tokens: int
    max_query_len: int
    max_context_len: int
    shared_runs: Sequence[SharedRun] = ()

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return self.num_decodes + self.num_chunk_tokens


@dataclass(frozen=True, slots=True)
class PagedKeysValues:
    """One layer's part of the pool: views [num_blocks, block_size, num_kv_heads, head_dim], contiguous in the last dimension.

    Where the pool is float8 its elements are the keys divided by `key_scale`, the values divided by `value_scale`.
    """

    keys: Tensor
    values: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


class AttentionBackend(Protocol):
    """A way to compute attention. One for the life of an executor; the compute thread calls it."""

    @property
    def name(self) -> str:
        """As `EngineConfig.attention_backend` spells it."""
        ...

    @property
    def can_be_captured(self) -> bool:
        """Whether decode steps of it can go into CUDA graphs: no host reads, no shapes that depend on contents."""
        ...

    @property
    def attends_shared(self) -> bool:
        """Whether `shared_runs` are attended once for all their rows."""
        ...

    def attend(self, query: Tensor, cache: PagedKeysValues, inputs: AttentionInputs, out: Tensor) -> None:
        """Attend with `query` [tokens, num_heads, head_dim], writing `out` of the same shape and dtype.

        Scores are scaled by head_dim ** -0.5; `num_heads` is a multiple of the pool's. Launches on the current stream
        and does not wait for it. What lies in the pool beyond a row's context is not read into its result, NaN included.
        """
        ...

    def warm_up(self, cache: PagedKeysValues, dtype: torch.dtype) -> None:
        """Get ready for whatever steps over `cache` may need, for queries of `dtype`: compile now what would be compiled then.

        Launches on the current stream; reads block 0 at most, and drops what it computes.
        """
        ...
