"""The KV pools of a GPU: the one that steps compute in, and the host tier in pinned memory.

Block first, on both: a block over all layers is one contiguous run, so copying one is one large move, and the layers see
the device's pool through strided views, which attention kernels take as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...protocol.ids import BlockId
from ...protocol.messages import BlockCopy
from ..models.config import ModelConfig
from .attention.contract import PagedKeysValues
from .glue import Glue
from .runtime import Runtime, Stream

Copy = Callable[[Sequence[BlockId], Sequence[BlockId]], None]

PROBE_BLOCKS = 64
PROBES = 4


class KvScales(NamedTuple):
    """What a layer's keys and values are divided by before they are stored in float8."""

    key: float = 1.0
    value: float = 1.0


class DevicePool:
    """`blocks` is [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]: keys at 0, values at 1.

    Memory is not cleared: a slot nobody has written may hold anything, NaN included, and is never read.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[KvScales] | None = None,
    ) -> None:
        """`scales` are the layers', for a float8 pool; None: 1 everywhere."""
        self.block_size = block_size
        shape = (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        self.blocks = torch.empty(shape, dtype=dtype, device=device)
        self.caches = [
            PagedKeysValues(self.blocks[:, layer, 0], self.blocks[:, layer, 1], *scale)
            for layer, scale in enumerate(scales or [KvScales()] * config.num_layers)
        ]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.blocks[:1].nbytes

    @property
    def key_bytes(self) -> int:
        """Bytes of a token's key and value in all heads of one layer."""
        return self.blocks[0, 0, :, 0].nbytes

    def copy(self, columns: Tensor, batches: Sequence[tuple[int, int]], glue: Glue) -> None:
        """Launch copies of the leading slots of blocks, all layers.

        `columns` is int64 [3, copies] on the device: sources, targets, numbers of slots. `batches` are the runs of
        `independent`, which go one after another: [first, last) each.
        """
        for first, last in batches:
            sources, targets, counts = columns[:, first:last]
            glue.copy_slots(self.blocks, sources, targets, counts)


def independent(copies: Sequence[BlockCopy]) -> list[tuple[int, int]]:
    """`copies`, of which a later one may overwrite what an earlier one reads, in runs [first, last) that may each go at once.

    Within a run no target is another one's source or target.
    """
    runs: list[tuple[int, int]] = []
    first = 0
    sources: set[BlockId] = set()
    targets: set[BlockId] = set()
    for index, copy in enumerate(copies):
        if copy.target in sources or copy.target in targets or copy.source in targets:
            runs.append((first, index))
            first, sources, targets = index, set(), set()
        sources.add(copy.source)
        targets.add(copy.target)
    if first < len(copies):
        runs.append((first, len(copies)))
    return runs


class PinnedPool:
    """The host tier: `num_blocks` blocks like those of `device`, in memory that the copy engines reach by themselves."""

    def __init__(self, device: DevicePool, runtime: Runtime, *, num_blocks: int) -> None:
        self.blocks = runtime.pinned((num_blocks, *device.blocks.shape[1:]), device.blocks.dtype)
        self._device = device
        self._runtime = runtime

    def copy_out(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        """Launch the copy of device blocks `sources[i]` to host blocks `targets[i]` on the current stream."""
        _copy_each(self._device.blocks, self.blocks, sources, targets)

    def copy_in(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        """Launch the copy of host blocks `sources[i]` to device blocks `targets[i]` on the current stream."""
        _copy_each(self.blocks, self._device.blocks, sources, targets)

    def measure(self) -> tuple[float, float]:
        """Bytes/s of a copy out and of one in, while nothing else runs; 0.0 for both without blocks to try it with.

        Leaves junk in the first blocks of both pools: nothing has been written there yet.
        """
        blocks = [BlockId(index) for index in range(min(PROBE_BLOCKS, len(self.blocks), len(self._device.blocks)))]
        if not blocks:
            return 0.0, 0.0
        return self._fastest(self._runtime.copy_out, self.copy_out, blocks), self._fastest(
            self._runtime.copy_in, self.copy_in, blocks
        )

    def _fastest(self, stream: Stream, copy: Copy, blocks: Sequence[BlockId]) -> float:
        seconds = []
        for _ in range(PROBES):
            start = stream.record(timed=True)
            stream.launch(lambda: copy(blocks, blocks))
            end = stream.record(timed=True)
            end.synchronize()
            seconds.append(end.seconds_since(start))
        return len(blocks) * self._device.block_bytes / max(min(seconds), 1e-9)


def _copy_each(source: Tensor, target: Tensor, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
    """One call a block: each is one contiguous run, of hundreds of kilobytes, which is what the copy engines like."""
    for block, place in zip(sources, targets, strict=True):
        target[place].copy_(source[block], non_blocking=True)
