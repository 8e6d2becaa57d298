"""Drawing the next tokens of a step: batched over rows with different parameters, float32.

A row's token is a function of its own logits, parameters and random stream, and of nothing else:
every operation works within a row, and which path a row takes is decided by that row alone. The
random number of a draw is not the state of a generator but a hash of (seed, index of the sequence,
output position), so preemption, restarts, neighbours and places in the batch cannot move it.

Order of the filters, as vLLM has it: temperature, min-p, top-k, top-p; each works on what the one
before left, renormalised. Weights stay unnormalised - exp of (logit - maximum) / temperature, the
maximum's being exactly 1 - which makes min-p a plain comparison and leaves no division that could
overflow at tiny temperatures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..protocol.messages import TokenLogprobs
from ..protocol.sampling import SamplingParams
from .logprobs import token_logprobs

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: no two distinct 16-bit logits are close enough to matter."""

_MAX_CANDIDATES = 1024
"""Largest part of the vocabulary that is sorted to find the top; rows that need more sort all of it."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class SamplingRow(NamedTuple):
    """Whose draw a row is: the `sequence`-th of its request, with `position` output tokens before it."""

    params: SamplingParams
    sequence: int
    position: int


class Sampled(NamedTuple):
    """A token a row; meaningless for the rows listed in `failed`, whose logits were not finite.

    `logprobs` belong to the rows by number, and only to those that ask for them and have not failed.
    """

    token_ids: list[int]
    failed: list[int]
    logprobs: Mapping[int, TokenLogprobs] = MappingProxyType({})


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
    """Draw one token for each of the rows of `logits`, float32 [rows, vocab_size].

    A row fails if a logit is NaN or plus infinity, or all are minus infinity; single minus infinities
    are masked tokens. Raises `ValueError` for a row that draws at random and has no seed.
    """
    maxima, greedy = logits.max(dim=-1)
    finite = maxima.isfinite().tolist()  # a NaN anywhere in a row is its maximum
    token_ids: list[int] = greedy.tolist()
    drawn = [i for i, row in enumerate(rows) if finite[i] and row.params.temperature >= GREEDY_BELOW]
    for group, draw in (
        ([i for i in drawn if not _filters_by_rank(rows[i].params)], _draw_from_all),
        ([i for i in drawn if _filters_by_rank(rows[i].params)], _draw_from_top),
    ):
        if group:
            own = [rows[i] for i in group]
            scaled = (logits[group] - maxima[group, None]) / _column(logits, [row.params.temperature for row in own])
            for i, token in zip(group, draw(scaled, own), strict=True):
                token_ids[i] = token
    asking = [i for i, row in enumerate(rows) if finite[i] and row.params.logprobs is not None]
    logprobs: dict[int, TokenLogprobs] = {}
    if asking:
        counts = [rows[i].params.logprobs or 0 for i in asking]
        found = token_logprobs(logits[asking], [token_ids[i] for i in asking], counts)
        logprobs = dict(zip(asking, found, strict=True))
    return Sampled(token_ids, [i for i, is_finite in enumerate(finite) if not is_finite], logprobs)


def uniforms(seeds: Sequence[int], sequences: Sequence[int], positions: Sequence[int]) -> list[float]:
    """One number in [0, 1) for each (seed, sequence index, output position), 53 random bits each.

    Counter-based: chained finalisers of SplitMix64 (Steele, Lea and Flood 2014). `seeds` are any
    64-bit integers, signed or not.
    """
    state = np.zeros(len(seeds), dtype=np.uint64)
    for words in (seeds, sequences, positions):
        state = _mix((state ^ np.array([word & 0xFFFFFFFFFFFFFFFF for word in words], dtype=np.uint64)) + _GOLDEN)
    numbers: list[float] = ((state >> np.uint64(11)) * 2.0**-53).tolist()
    return numbers


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _filters_by_rank(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0


def _draw_from_all(scaled: Tensor, rows: list[SamplingRow]) -> list[int]:
    """Draw in vocabulary order: no sort is needed where only min-p filters."""
    picked: list[int] = _pick(_weights(scaled, rows), rows).flatten().tolist()
    return picked


def _draw_from_top(scaled: Tensor, rows: list[SamplingRow]) -> list[int]:
    """Draw from the most likely tokens, sorted, as top-k and top-p want them."""
    weights = _weights(scaled, rows)
    size = weights.shape[-1]
    top, token_ids = weights.topk(min(_MAX_CANDIDATES, size), dim=-1)
    kept, suffices = _top_filtered(top, weights, rows)
    tokens: list[int] = token_ids.gather(-1, _pick(kept, rows)).flatten().tolist()
    for i in [i for i, enough in enumerate(suffices) if not enough]:
        every, every_id = weights[i : i + 1].sort(dim=-1, descending=True)
        kept, _ = _top_filtered(every, weights[i : i + 1], rows[i : i + 1])
        tokens[i] = int(every_id[0, _pick(kept, rows[i : i + 1])[0, 0]])
    return tokens


def _weights(scaled: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Unnormalised probabilities after min-p; a row's largest is 1."""
    weights = scaled.exp()
    min_p = _column(weights, [row.params.min_p for row in rows])
    return weights.masked_fill_(weights < min_p, 0.0)


def _top_filtered(top: Tensor, weights: Tensor, rows: list[SamplingRow]) -> tuple[Tensor, list[bool]]:
    """`top` [rows, candidates], the largest of `weights` in falling order, with what top-k and top-p drop set to 0.

    Also whether the candidates sufficed: all that the filters keep are among them, and the mass that
    top-p is a share of is known.
    """
    candidates, size = top.shape[-1], weights.shape[-1]
    # Bounded before they become a tensor: a caller's integer may be larger than one holds.
    top_k = _column(top, [min(row.params.top_k, size) if row.params.top_k > 0 else size for row in rows], torch.int64)
    top_p = _column(top, [row.params.top_p for row in rows], torch.float64)
    kept = top.masked_fill(torch.arange(candidates, device=top.device) >= top_k, 0.0)
    mass = kept.double().cumsum(dim=-1)
    goal = top_p * torch.where(top_k <= candidates, mass[:, -1:], _total(weights))
    suffices = (top_k <= candidates) | (top_k == size) & (mass[:, -1:] >= goal)
    # A token stays if those ahead of it do not already make up the goal.
    return kept.masked_fill(mass - kept >= goal, 0.0), suffices.flatten().tolist()


def _total(weights: Tensor) -> Tensor:
    """Sum of each row in float64. A running sum, since its order does not depend on the number of rows or threads."""
    return weights.double().cumsum(dim=-1)[:, -1:]


def _pick(weights: Tensor, rows: list[SamplingRow]) -> Tensor:
    """The position of one draw a row, [rows, 1], by inverting the cumulative weights in float64.

    The first position whose cumulative weight exceeds u * total: never one of weight 0, and always
    one that exists, since u is below 1 and the product is rounded below the total.
    """
    numbers = uniforms([_seed(row) for row in rows], [row.sequence for row in rows], [row.position for row in rows])
    cumulative = weights.double().cumsum(dim=-1)
    target = cumulative[:, -1:] * torch.tensor(numbers, dtype=torch.float64, device=weights.device)[:, None]
    return torch.searchsorted(cumulative, target, right=True)


def _seed(row: SamplingRow) -> int:
    if row.params.seed is None:
        raise ValueError("a row that samples at random has no seed")
    return row.params.seed


def _column(like: Tensor, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]
