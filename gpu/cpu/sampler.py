"""Sampling in the C kernels: one call for all rows of a step, made without the GIL.

The structs are those of `kernels/sampling.h`, field by field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from ..sampling import GREEDY_BELOW, Sampled, SamplingRow, row_logprobs, seeds_of, uniforms
from .memory import huge_empty

_NUM_MASKS = 2
_NOT_FINITE, _NO_TOKEN_LEFT = 1, 2


class Draw(ctypes.Structure):
    """`Draw`: how one row is drawn."""

    _fields_ = (
        ("uniform", c_double),
        ("top_p", c_double),
        ("top_k", c_int64),
        ("masks", c_void_p * _NUM_MASKS),
        ("num_words", c_int64 * _NUM_MASKS),
        ("barred", c_void_p),
        ("bias_ids", c_void_p),
        ("bias", c_void_p),
        ("seen", c_void_p),
        ("penalties", c_void_p),
        ("num_barred", c_int64),
        ("num_bias", c_int64),
        ("num_seen", c_int64),
        ("temperature", c_float),
        ("min_p", c_float),
        ("repetition", c_float),
        ("unused", c_int32),
    )


class Sampling(ctypes.Structure):
    """`Sampling`: rows of logits, and where their tokens go."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("vocab", c_int64),
        ("num_draws", c_int64),
        ("draws", c_void_p),
        ("scratch", c_void_p),
        ("tokens", c_void_p),
        ("outcomes", c_void_p),
    )


_DRAW = np.dtype(Draw)


class Sampler:
    """`gpu.sampling.sample` in C, on the threads of `team`, which is the caller's and outlives it."""

    def __init__(self, library: ctypes.CDLL, level: int, team: int, *, num_threads: int, vocab_size: int) -> None:
        self._library = library
        self._level = level
        self._team = team
        self._vocab_size = vocab_size
        self._scratch = huge_empty([num_threads, library.sample_floats(vocab_size)], torch.float32)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
        """See `gpu.sampling.sample`. The rows of `logits` are contiguous, one behind the other at any distance."""
        draws = np.zeros(len(rows), _DRAW)
        self._fill(draws, rows)
        tokens = np.zeros(len(rows), np.int32)
        outcomes = np.empty(len(rows), np.uint8)
        call = Sampling(
            logits.data_ptr(),
            logits.stride(0),
            self._vocab_size,
            len(rows),
            draws.ctypes.data,
            self._scratch.data_ptr(),
            tokens.ctypes.data,
            outcomes.ctypes.data,
        )
        self._library.run_sample(self._level, ctypes.byref(call), self._team)
        token_ids: list[int] = tokens.tolist()
        failed: list[int] = np.flatnonzero(outcomes).tolist()
        exhausted: list[int] = np.flatnonzero(outcomes == _NO_TOKEN_LEFT).tolist() if failed else []
        return Sampled(token_ids, failed, row_logprobs(logits, rows, token_ids, failed), exhausted)

    def _fill(self, draws: np.ndarray, rows: Sequence[SamplingRow]) -> None:
        size = self._vocab_size
        params = [row.params for row in rows]
        is_drawn = [one.temperature >= GREEDY_BELOW for one in params]
        draws["temperature"] = [one.temperature if drawn else 0.0 for one, drawn in zip(params, is_drawn, strict=True)]
        if any(is_drawn):
            draws["top_p"] = [one.top_p for one in params]
            # Bounded before they become an array: a caller's integer may be larger than one holds.
            draws["top_k"] = [min(one.top_k, size) if one.top_k > 0 else size for one in params]
            draws["min_p"] = [one.min_p for one in params]
            which = [i for i, drawn in enumerate(is_drawn) if drawn]
            draws["uniform"][which] = uniforms(*seeds_of([rows[i] for i in which]))
        for i, row in enumerate(rows):
            if not row.is_plain:
                _fill_edits(draws[i], row)


def _fill_edits(draw: np.void, row: SamplingRow) -> None:
    """The arrays of a row's edits, which live as long as `row`."""
    if row.allowed_mask is not None:
        draw["masks"][0], draw["num_words"][0] = row.allowed_mask.ctypes.data, len(row.allowed_mask)
    edits = row.edits
    if edits is None:
        return
    if edits.allowed is not None:
        draw["masks"][1], draw["num_words"][1] = edits.allowed.ctypes.data, len(edits.allowed)
    if len(edits.barred):
        draw["barred"], draw["num_barred"] = edits.barred.ctypes.data, len(edits.barred)
    if len(edits.bias_ids):
        draw["bias_ids"], draw["bias"] = edits.bias_ids.ctypes.data, edits.bias.ctypes.data
        draw["num_bias"] = len(edits.bias_ids)
    if len(edits.seen_ids):
        draw["seen"], draw["penalties"] = edits.seen_ids.ctypes.data, edits.penalties.ctypes.data
        draw["num_seen"], draw["repetition"] = len(edits.seen_ids), edits.repetition
