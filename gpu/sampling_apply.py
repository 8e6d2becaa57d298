"""Edits of logits in torch, batched over rows that ask for different ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .sampling_edits import Int32Array, LogitEdits, unpacked_mask

_MINUS_INFINITY = -math.inf


def apply_masks(logits: Tensor, masks: Sequence[tuple[int, Int32Array]]) -> None:
    """Set to minus infinity, in place, what a mask does not allow: (row of `logits`, packed words) pairs.

    `logits` is float32 [rows, vocab_size]; bit i of word j is token 32 j + i; tokens behind the last word are not allowed.
    A row may have several masks.
    """
    for row, words in masks:
        allowed = torch.from_numpy(unpacked_mask(words, logits.shape[-1])).to(logits.device)
        logits[row].masked_fill_(~allowed, _MINUS_INFINITY)


def apply_edits(logits: Tensor, edits: Sequence[tuple[int, LogitEdits]]) -> None:
    """Carry out, in place and in their order, the edits of (row of `logits`, edits) pairs, a row in one pair at most."""
    apply_masks(logits, [(row, edit.allowed) for row, edit in edits if edit.allowed is not None])
    barred = _Places(logits, [(row, edit.barred) for row, edit in edits])
    barred.write(torch.full((len(barred),), _MINUS_INFINITY, device=logits.device))
    biased = _Places(logits, [(row, edit.bias_ids) for row, edit in edits])
    biased.write(biased.read() + biased.values([edit.bias for _, edit in edits]))
    seen = _Places(logits, [(row, edit.seen_ids) for row, edit in edits])
    before = seen.read()
    repetition = seen.values([np.full(len(edit.seen_ids), edit.repetition, np.float32) for _, edit in edits])
    after = torch.where(before > 0, before / repetition, before * repetition)
    seen.write(after - seen.values([edit.penalties for _, edit in edits]))


class _Places:
    """Places of `logits`: some tokens of some rows, read and written together."""

    def __init__(self, logits: Tensor, ids: Sequence[tuple[int, Int32Array]]) -> None:
        self._logits = logits
        rows = np.repeat([row for row, _ in ids], [len(tokens) for _, tokens in ids]).astype(np.int64)
        tokens = np.concatenate([tokens for _, tokens in ids]).astype(np.int64) if ids else np.empty(0, np.int64)
        self._index = (torch.from_numpy(rows).to(logits.device), torch.from_numpy(tokens).to(logits.device))

    def __len__(self) -> int:
        return len(self._index[0])

    def read(self) -> Tensor:
        return self._logits[self._index]

    def write(self, values: Tensor) -> None:
        if len(self):
            self._logits[self._index] = values

    def values(self, parts: Sequence[npt.NDArray[np.float32]]) -> Tensor:
        """A column for these places from a part a row."""
        joined = np.concatenate(parts) if parts else np.empty(0, np.float32)
        return torch.from_numpy(joined).to(self._logits.device)
