"""What several backends derive from a step's inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .contract import AttentionInputs

T = TypeVar("T")


class PerStep(Generic[T]):
    """Something that is made of a step's inputs in its first layer and kept for the others.

    A step is known by its `AttentionInputs` object: whoever changes what its tensors hold makes a new one. What a graph
    records is made anew in each layer, so that a replay derives it from the contents that it finds.
    """

    def __init__(self, make: Callable[[AttentionInputs], T]) -> None:
        self._make = make
        self._kept: tuple[AttentionInputs, T] | None = None

    def of(self, inputs: AttentionInputs) -> T:
        """The one that belongs to `inputs`."""
        if inputs.query_starts.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._make(inputs)
        if self._kept is None or self._kept[0] is not inputs:
            self._kept = inputs, self._make(inputs)
        return self._kept[1]


class ChunkStarts(NamedTuple):
    """Where each chunk's tokens begin among those of the chunks, and its keys among theirs: int32 [chunks + 1] each."""

    queries: Tensor
    keys: Tensor


def chunk_starts(inputs: AttentionInputs) -> ChunkStarts:
    """The starts of a step's chunks, which lie behind its decode rows. Does not wait for the device."""
    first, last = inputs.num_decodes, inputs.num_decodes + inputs.num_chunks
    keys = inputs.context_lens.new_zeros(inputs.num_chunks + 1)
    torch.cumsum(inputs.context_lens[first:last], dim=0, dtype=torch.int32, out=keys[1:])
    return ChunkStarts(queries=inputs.query_starts[first : last + 1] - first, keys=keys)


def block_tables_up_to_bound(inputs: AttentionInputs, block_size: int) -> Tensor:
    """The block tables without columns that no row of `inputs` can need: a view.

    flash-attn takes the width of a table for the longest context when it chooses how many parts to split keys into.
    """
    return inputs.block_tables[:, : -(-inputs.max_context_len // block_size)]
