"""Steps in torch: the path for any model, dtype and machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..models.decoder import Batch, Decoder
from ..sampling import Sampled, SamplingRow, sample
from ..slots import Row
from .attention import PagedAttention
from .plan import SharedGroups
from .pool import KvPool


class TorchPath:
    """Implements `ComputePath`. Shared groups change nothing here: as matrix products of torch they lose."""

    def __init__(self, decoder: Decoder, pool: KvPool, *, description: str) -> None:
        self._decoder = decoder
        self._pool = pool
        self.description = description

    def compute(
        self,
        rows: Sequence[Row],
        draws: Sequence[SamplingRow],
        shared: SharedGroups,
        *,
        before_draws: Callable[[], None] | None = None,
    ) -> Sampled:
        """See `ComputePath.compute`."""
        with torch.inference_mode():
            logits = self._decoder.forward(flat_batch(rows), PagedAttention(self._pool, rows))
            if before_draws is not None:
                before_draws()
            return sample(logits, draws) if draws else Sampled([], [])

    def close(self) -> None:
        """Nothing to do: the memory goes with the object."""


def flat_batch(rows: Sequence[Row]) -> Batch:
    """The rows' tokens one behind the other, and where the logits of those that sample will be."""
    token_ids: list[int] = []
    positions: list[int] = []
    sample_at: list[int] = []
    for row in rows:
        token_ids += row.slot.token_ids[row.start : row.end]
        positions += range(row.start, row.end)
        if row.samples:
            sample_at.append(len(token_ids) - 1)
    return Batch(torch.tensor(token_ids), torch.tensor(positions), torch.tensor(sample_at, dtype=torch.int64))
