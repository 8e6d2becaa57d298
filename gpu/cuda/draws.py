"""Drawing tokens on the device without waiting for it: the parameters of a step's rows in one tensor, and what reads them.

Only for rows that are drawn from the logits as they are (`SamplingRow.is_plain`, no logprobs); `gpu.sampling.sample` is the
definition, and does the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...protocol.sampling import SamplingParams
from ..sampling import GREEDY_BELOW, SamplingRow, sample, seeds_of

NO_TOP_K = 2**31 - 1
"""What stands for a top-k that is off: no vocabulary is larger."""

_MAX_TEMPERATURE = 1e36
"""Largest that the kernels are given: it has an inverse in float32, and all weights are 1 long before."""


class Status(IntEnum):
    """How the draw of a row went."""

    DRAWN = 0
    NOT_FINITE = 1


class Column(IntEnum):
    """The columns of `DrawParameters`, and what their 64 bits are. A temperature of 0 is greedy, and the rest then unread."""

    TEMPERATURE = 0  # float64
    MIN_P = 1  # float64
    TOP_P = 2  # float64
    TOP_K = 3  # int64, `NO_TOP_K` if off
    SEED = 4  # int64, or the bits of a uint64
    SEQUENCE = 5  # int64
    POSITION = 6  # int64


class DrawParameters:
    """How each row of a step is drawn: `table`, int64 [len(Column), max_rows] in host memory, columns by `Column`.

    It is made to travel to the device in one copy. Not to be written while such a copy may still read it.
    """

    def __init__(self, table: Tensor) -> None:
        """Write into `table`, contiguous and the caller's: a pinned tensor, for copies that need not wait."""
        if table.dtype != torch.int64 or table.dim() != 2 or table.shape[0] != len(Column) or not table.is_contiguous():
            raise ValueError(f"a table of draws is contiguous int64 [{len(Column)}, rows], not {table.dtype} {[*table.shape]}")
        self.table = table
        self._integers = table.numpy()
        self._floats = self._integers.view(np.float64)

    def write(self, rows: Sequence[SamplingRow]) -> None:
        """Write the parameters of `rows`; the entries behind them, which pad a step, become greedy.

        Raises `ValueError` for more rows than there is room for, and for a row that draws at random without a seed.
        """
        count, max_rows = len(rows), self.table.shape[1]
        if count > max_rows:
            raise ValueError(f"{count} rows do not fit a table of {max_rows}")
        self._integers.fill(0)
        drawn = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
        if not drawn:
            return
        mine = [rows[i] for i in drawn]
        params = [row.params for row in mine]
        seeds, sequences, positions = seeds_of(mine)
        self._floats[Column.TEMPERATURE, drawn] = [min(one.temperature, _MAX_TEMPERATURE) for one in params]
        self._floats[Column.MIN_P, drawn] = [one.min_p for one in params]
        self._floats[Column.TOP_P, drawn] = [one.top_p for one in params]
        self._integers[Column.TOP_K, drawn] = [min(one.top_k, NO_TOP_K) if one.top_k > 0 else NO_TOP_K for one in params]
        for column, words in ((Column.SEED, seeds), (Column.SEQUENCE, sequences), (Column.POSITION, positions)):
            self._integers[column, drawn] = np.array([word & 0xFFFFFFFFFFFFFFFF for word in words], np.uint64).view(np.int64)


class DeviceSampler(Protocol):
    """Draws a token for each row of a step, as `gpu.sampling.sample` does for plain rows."""

    def draw(self, logits: Tensor, parameters: Tensor, *, num_rows: int, tokens: Tensor, statuses: Tensor) -> None:
        """Draw for the first `num_rows` rows of `logits` [rows, vocab_size]: float32, bfloat16 or float16, contiguous rows.

        `parameters` is a `DrawParameters.table` on the logits' device. Writes the first `num_rows` of `tokens` (int32 or
        int64) and of `statuses` (int32, by `Status`); the token of a row that was not drawn is 0. `logits` are not changed.
        """
        ...


class TritonSampler:
    """Implements `DeviceSampler` in Triton kernels: four launches whatever the rows ask for, and no wait for the device.

    A CUDA graph can hold a draw: nothing depends on what the tensors hold, and the memory it works in is its own. So one
    draw at a time, in the order of one stream.
    """

    def __init__(
        self, *, max_rows: int, vocab_size: int, device: torch.device, part: int = 4096, max_candidates: int = 4096
    ) -> None:
        """Memory for `max_rows` rows: 32 KiB each, and some more with the size of the vocabulary.

        A program takes `part` tokens of a row; of up to `max_candidates` tokens top-k and top-p are sure to be quick. Both are
        powers of two; other sizes than these are for tests.
        """
        from .kernels import sampling, sampling_filters

        self._kernels: Any = sampling
        self._draw_filtered: Any = sampling_filters.draw_filtered
        self._vocab_size = vocab_size
        self._part = part
        self._num_parts = -(-vocab_size // part)
        parts = 1 << (self._num_parts - 1).bit_length()  # those that are too many stay as they are made here

        def filled(*shape: int, dtype: torch.dtype, value: float = 0) -> Tensor:
            return torch.full((max_rows, *shape), value, dtype=dtype, device=device)

        self._maxima = filled(parts, dtype=torch.float32, value=float("-inf"))
        self._max_ids = filled(parts, dtype=torch.int32)
        self._counts = filled(sampling.LEVELS, parts, dtype=torch.int32)
        self._masses = filled(sampling.LEVELS, parts, dtype=torch.float64)
        self._candidates = filled(max_candidates, dtype=torch.float32)
        self._candidate_ids = filled(max_candidates, dtype=torch.int32)
        self._num_candidates = filled(dtype=torch.int32)

    def draw(self, logits: Tensor, parameters: Tensor, *, num_rows: int, tokens: Tensor, statuses: Tensor) -> None:
        """See `DeviceSampler.draw`. Launches on the current stream."""
        self._check(logits, num_rows)
        if num_rows == 0:
            return
        kernels, stride, vocab, max_rows = self._kernels, logits.stride(0), self._vocab_size, parameters.stride(0)
        parts, levels, room = self._maxima.shape[1], kernels.LEVELS, self._candidates.shape[1]
        # Candidates are logits, of their type; the memory is that of the widest.
        found = (self._candidates.view(logits.dtype), self._candidate_ids, self._num_candidates)
        pieces = (num_rows, self._num_parts)
        common = {"PARTS": parts, "num_warps": kernels.NUM_WARPS}
        kernels.find_maxima[pieces](logits, self._maxima, self._max_ids, stride, vocab, PART=self._part, **common)
        kernels.weigh_parts[pieces](
            logits, parameters, self._maxima, self._counts, self._masses, stride, vocab, max_rows,
            PART=self._part, LEVELS=levels, **common,
        )  # fmt: skip
        kernels.settle[pieces](
            logits, parameters, self._maxima, self._max_ids, self._counts, self._masses, *found, tokens, statuses,
            stride, vocab, max_rows, PART=self._part, LEVELS=levels, CANDIDATES=room, **common,
        )  # fmt: skip
        self._draw_filtered[(num_rows,)](
            logits, parameters, self._maxima, self._counts, self._masses, *found, tokens,
            stride, vocab, max_rows, LEVELS=levels, CANDIDATES=room, **common,
        )  # fmt: skip

    def _check(self, logits: Tensor, num_rows: int) -> None:
        max_rows = self._maxima.shape[0]
        if logits.shape[1] != self._vocab_size or (logits.stride(1) != 1 and self._vocab_size > 1):
            raise ValueError(f"logits are [rows, {self._vocab_size}] with contiguous rows, not {[*logits.shape]}")
        if num_rows > max_rows:
            raise ValueError(f"{num_rows} rows, and memory for {max_rows}")


class TorchSampler:
    """Implements `DeviceSampler` where there is no Triton: `gpu.sampling.sample`. It waits for the device."""

    def draw(self, logits: Tensor, parameters: Tensor, *, num_rows: int, tokens: Tensor, statuses: Tensor) -> None:
        """See `DeviceSampler.draw`."""
        if num_rows == 0:
            return
        result = sample(logits[:num_rows].float(), _rows_of(parameters[:, :num_rows]))
        drawn = torch.tensor(result.token_ids)
        went = torch.full((num_rows,), int(Status.DRAWN))
        drawn[result.failed], went[result.failed] = 0, int(Status.NOT_FINITE)
        tokens[:num_rows].copy_(drawn)
        statuses[:num_rows].copy_(went)


def _rows_of(parameters: Tensor) -> list[SamplingRow]:
    """Rows that are drawn like those that `parameters` was written from."""
    integers = parameters.cpu().contiguous().numpy()
    columns = integers.view(np.float64)[: Column.TOP_K].tolist() + integers[Column.TOP_K :].tolist()
    return [
        SamplingRow(
            SamplingParams(
                temperature=temperature, min_p=min_p, top_p=top_p, top_k=0 if top_k == NO_TOP_K else top_k, seed=seed
            ),
            sequence,
            position,
        )
        for temperature, min_p, top_p, top_k, seed, sequence, position in zip(*columns, strict=True)
    ]
