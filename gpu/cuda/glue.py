"""What a layer does between its matrix products, behind one contract: in Triton kernels, or in torch as their reference."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.decoder import rms_norm
from ..models.rope import rotate
from .attention.contract import PagedKeysValues
from .fp8 import quantized


class Glue(Protocol):
    """The operations of a decoder that are not matrix products or attention. None waits for the device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension of `x`, in float32. Returns a new tensor.

        `x` is [rows, width], or [tokens, heads, width] of a fused projection.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `x` to `residual` in place, both [tokens, hidden]; return the norm of the sum."""
        ...

    def rope_and_write(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        positions: Tensor,
        cos_sin: Tensor,
        slots: Tensor,
        cache: PagedKeysValues,
    ) -> None:
        """Turn `query` in place, and write turned keys and the values into a layer's part of the pool.

        `query` is [tokens, num_heads, head_dim], `key` and `value` [tokens, num_kv_heads, head_dim]: views of one fused
        projection, contiguous in the last dimension. `positions` int64 [tokens] indexes `cos_sin` float32
        [positions, head_dim], cosines before sines. `slots` int64 [tokens] is block * block_size + offset; a negative one
        writes nothing. `cache` is of the projection's dtype or float8, with any strides but 1 in the last dimension.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for `gate_up` [tokens, 2 * intermediate]: a new tensor [tokens, intermediate]."""
        ...

    def copy_slots(self, pool: Tensor, sources: Tensor, targets: Tensor, counts: Tensor) -> None:
        """Copy the first `counts[i]` token slots of block `sources[i]` to `targets[i]`, all layers; int64 [copies] each.

        `pool` is [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]. No target is another one's source or target.
        """
        ...

    def gather_blocks(self, pool: Tensor, blocks: Tensor, out: Tensor) -> None:
        """Copy blocks `blocks` int64 [n] of `pool`, over all layers, to `out` [n, ...]."""
        ...

    def scatter_blocks(self, pool: Tensor, blocks: Tensor, source: Tensor) -> None:
        """Copy `source` [n, ...] to blocks `blocks` int64 [n] of `pool`. No block occurs twice."""
        ...


class TorchGlue:
    """Implements `Glue` in torch's own operations: the reference, and the way where there is no Triton."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Glue.rms_norm`."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Glue.add_rms_norm`."""
        residual += x
        return rms_norm(residual, weight, eps)

    def rope_and_write(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        positions: Tensor,
        cos_sin: Tensor,
        slots: Tensor,
        cache: PagedKeysValues,
    ) -> None:
        """See `Glue.rope_and_write`. Waits for the device where a slot is negative."""
        cos, sin = cos_sin[positions].to(query.dtype)[:, None].chunk(2, dim=-1)
        query.copy_(rotate(query, cos, sin))
        written = (slots >= 0).nonzero().flatten()
        block_size = cache.keys.shape[1]
        places = (slots[written] // block_size, slots[written] % block_size)
        turned = rotate(key, cos, sin)
        for target, source, scale in ((cache.keys, turned, cache.key_scale), (cache.values, value, cache.value_scale)):
            _bits(target).index_put_(places, _bits(_as_stored(source[written], target.dtype, scale)))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Glue.silu_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def copy_slots(self, pool: Tensor, sources: Tensor, targets: Tensor, counts: Tensor) -> None:
        """See `Glue.copy_slots`. Waits for the device."""
        columns = zip(sources.tolist(), targets.tolist(), counts.tolist(), strict=True)
        for source, target, count in columns:
            pool[target, :, :, :count].copy_(pool[source, :, :, :count])

    def gather_blocks(self, pool: Tensor, blocks: Tensor, out: Tensor) -> None:
        """See `Glue.gather_blocks`."""
        torch.index_select(_bits(pool), 0, blocks, out=_bits(out))

    def scatter_blocks(self, pool: Tensor, blocks: Tensor, source: Tensor) -> None:
        """See `Glue.scatter_blocks`."""
        _bits(pool).index_copy_(0, blocks, _bits(source))


def _as_stored(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """`values` as a pool of `dtype`, their own or float8, holds them."""
    return values if dtype == values.dtype else quantized(values, scale)


def _bits(values: Tensor) -> Tensor:
    """`values`, or a view of them that torch can index: of float8 it does not know how to on every device."""
    return values.view(torch.uint8) if values.dtype.itemsize == 1 else values
