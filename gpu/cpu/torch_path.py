"""Steps in torch: the path for any model, dtype and machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..logprobs import prompt_parts
from ..models.decoder import Batch, Decoder
from ..prompts import prompt_rows
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
            batch, attention = flat_batch(rows), PagedAttention(self._pool, rows)
            asking = prompt_rows(rows)
            if not asking:
                return self._sample(self._decoder.forward(batch, attention), draws, before_draws)
            every = self._decoder.hidden(replace(batch, sample_at=torch.arange(len(batch.token_ids))), attention)
            prompts, failed = prompt_parts(asking, lambda first, last: self._decoder.head(every[first:last]))
            sampled = self._sample(self._decoder.head(every[batch.sample_at]), draws, before_draws)
            return sampled._replace(prompts=prompts, failed_prompts=failed)

    @staticmethod
    def _sample(logits: Tensor, draws: Sequence[SamplingRow], before_draws: Callable[[], None] | None) -> Sampled:
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
