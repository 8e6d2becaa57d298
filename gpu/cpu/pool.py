"""The KV pool in main memory.

Block first: a block over all layers is one contiguous run, so copying one is one large move; the
layers see it through strided views, which costs the computation nothing that could be measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...protocol.messages import BlockCopy
from ..models.config import ModelConfig
from .memory import huge_empty


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block over all layers."""
    return config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


class KvPool:
    """`blocks` is [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]: keys at 0, values at 1.

    `keys[layer]` and `values[layer]` are its views [num_blocks, block_size, num_kv_heads, head_dim].
    Memory is not cleared: a slot nobody has written may hold anything, NaN included, and is never read.
    """

    def __init__(self, config: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.block_size = block_size
        self.blocks = huge_empty((num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim), dtype)
        self.keys: list[Tensor] = [self.blocks[:, layer, 0] for layer in range(config.num_layers)]
        self.values: list[Tensor] = [self.blocks[:, layer, 1] for layer in range(config.num_layers)]

    def copy(self, copies: list[BlockCopy]) -> None:
        """Copy the leading slots of blocks, all layers, one after another: a target may be a later one's source."""
        for source, target, num_tokens in ((copy.source, copy.target, copy.num_tokens) for copy in copies):
            self.blocks[target, :, :, :num_tokens].copy_(self.blocks[source, :, :, :num_tokens])
