"""The KV pools in main memory: the one that steps compute in, and the host tier beside it.

Block first: a block over all layers is one contiguous run, so copying one is one large move; the
layers see it through strided views, which costs the computation nothing that could be measured.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...protocol.ids import BlockId
from ...protocol.messages import BlockCopy
from ..models.config import ModelConfig
from .library import KernelsUnavailableError, open_library
from .memory import PagesAhead, huge_empty

MoveBlocks = Callable[[Tensor, Tensor, Sequence[BlockId], Sequence[BlockId]], None]
"""Copies block `sources[i]` of the first pool to block `targets[i]` of the second; ids are the caller's to check."""


PROBE_BLOCKS = 8
PROBES = 4


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


class HostPool:
    """The host tier: `num_blocks` blocks like those of `device`, in memory that nothing computes in.

    Memory is taken as copies come to it. The two methods may run side by side, and beside steps that use other blocks;
    neither holds Python's lock while it copies. Ids are in range: the caller has checked them.
    """

    def __init__(self, device: KvPool, *, num_blocks: int) -> None:
        self.blocks = huge_empty((num_blocks, *device.blocks.shape[1:]), device.blocks.dtype)
        self._device = device.blocks
        self._block_bytes = device.blocks[0].nbytes
        self._move = block_mover()
        self._pages = PagesAhead(self.blocks)

    def copy_out(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        """Copy device blocks `sources[i]` to host blocks `targets[i]`."""
        self._pages.reach(block * self._block_bytes for block in targets)
        self._move(self._device, self.blocks, sources, targets)

    def copy_in(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        """Copy host blocks `sources[i]` to device blocks `targets[i]`."""
        self._move(self.blocks, self._device, sources, targets)

    def measure(self) -> tuple[float, float]:
        """Bytes/s of a copy out and of one in, while nothing else runs; 0.0 for both without blocks to try it with.

        Leaves junk in the first blocks of both pools, whose memory it takes: nothing has been written there yet.
        """
        blocks = [BlockId(index) for index in range(min(PROBE_BLOCKS, len(self.blocks), len(self._device)))]
        if not blocks:
            return 0.0, 0.0
        return self._fastest(self.copy_out, blocks), self._fastest(self.copy_in, blocks)

    def _fastest(self, copy: Callable[[Sequence[BlockId], Sequence[BlockId]], None], blocks: Sequence[BlockId]) -> float:
        seconds = []
        for _ in range(PROBES):  # the first one finds its pages
            started = time.perf_counter()
            copy(blocks, blocks)
            seconds.append(time.perf_counter() - started)
        return len(blocks) * self._block_bytes / min(seconds)

    def close(self) -> None:
        """Take no more memory."""
        self._pages.close()


def block_mover() -> MoveBlocks:
    """The fastest way to move blocks: the C kernel, or the C library's `memmove` where the kernels are not built."""
    try:
        return partial(move_in_one_call, open_library())
    except KernelsUnavailableError:
        return move_one_by_one


def move_in_one_call(
    library: ctypes.CDLL, source: Tensor, target: Tensor, sources: Sequence[BlockId], targets: Sequence[BlockId]
) -> None:
    """`MoveBlocks` in C, past the caches."""
    from_ids, to_ids = np.array(sources, np.int64), np.array(targets, np.int64)
    library.copy_blocks(
        source.data_ptr(), target.data_ptr(), from_ids.ctypes.data, to_ids.ctypes.data, len(sources), source[:1].nbytes
    )


def move_one_by_one(source: Tensor, target: Tensor, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
    """`MoveBlocks` without the kernels. Not torch's `copy_`: it is slower, and would share each block among threads."""
    block_bytes = source[:1].nbytes
    for block, place in zip(sources, targets, strict=True):
        ctypes.memmove(target.data_ptr() + place * block_bytes, source.data_ptr() + block * block_bytes, block_bytes)
