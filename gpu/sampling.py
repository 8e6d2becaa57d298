"""Drawing the next tokens of a step: batched over rows with different parameters, float32.

A row's token is a function of its own logits, parameters and random stream, and of nothing else:
every operation works within a row, and which path a row takes is decided by that row alone. The
random number of a draw is not the state of a generator but a hash of (seed, index of the sequence,
output position), so preemption, restarts, neighbours and places in the batch cannot move it.

The order is vLLM's (`vllm/v1/sample/sampler.py`, the docstring of `Sampler`; the grammar's mask is applied before it,
`vllm/v1/worker/gpu_model_runner.py`):

| step | what it does to a row | also where it is greedy |
| --- | --- | --- |
| allowed tokens | all others become minus infinity: the grammar's mask, `allowed_token_ids` | yes |
| bad words | the last token of one, where the output ends with the others | yes |
| minimum tokens | the model's ends and the row's stop ids, while the output is shorter | yes |
| bias | added | yes |
| repetition penalty | of tokens in prompt or output: a positive logit is divided by it, another multiplied | yes |
| frequency, presence penalty | of tokens in the output: times how often, and once, subtracted | yes |
| temperature, min-p, top-k, top-p | each works on what the one before left, renormalised | no |

What depends on earlier tokens is in the row's `LogitEdits`, which its slot keeps. Logprobs are of the model's own logits,
before all of it.

Weights stay unnormalised - exp of (logit - maximum) / temperature, the maximum's being exactly 1 - which makes min-p a
plain comparison and leaves no division that could overflow at tiny temperatures. Of equal weights that top-k or top-p can
not keep all of, those with the lowest ids stay. Every draw is made in the order of the vocabulary.

This is the reference for the C kernel (`cpu/kernels/sample.h`), which does the same without a sort. Both add in float64 but
in another order, and their exponentials differ in the last bit: a draw that falls on the border between two tokens, one in
some millions, may give the other one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..protocol.ids import SequenceId
from ..protocol.messages import PromptPart, TokenLogprobs
from ..protocol.sampling import SamplingParams
from .logprobs import token_logprobs
from .sampling_apply import apply_edits, apply_masks
from .sampling_edits import Int32Array, LogitEdits

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: no two distinct 16-bit logits are close enough to matter."""

_MAX_CANDIDATES = 1024
"""Largest part of the vocabulary that is sorted to find the top; rows that need more sort all of it."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class SamplingRow(NamedTuple):
    """Whose draw a row is: the `sequence`-th of its request, with `position` output tokens before it.

    `edits` are what its parameters and its log change of the logits, None if nothing; `allowed_mask` is a mask beside them,
    int32 [ceil(vocab_size / 32)], bit i of word j set where token 32 j + i may be chosen.
    """

    params: SamplingParams
    sequence: int
    position: int
    edits: LogitEdits | None = None
    allowed_mask: Int32Array | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is drawn from the logits as they are."""
        return self.edits is None and self.allowed_mask is None


class Sampled(NamedTuple):
    """A token a row; meaningless for the rows listed in `failed`, whose logits were not finite.

    `logprobs` belong to the rows by number, and only to those that ask for them and have not failed. `exhausted` are the
    failed rows whose own masks are the reason: the model's logits were fit, and no token was left. `prompts` are what the
    step's rows found out about prompts, `failed_prompts` the sequences of those whose logits were not finite there.
    """

    token_ids: list[int]
    failed: list[int]
    logprobs: Mapping[int, TokenLogprobs] = MappingProxyType({})
    exhausted: Collection[int] = ()
    prompts: Sequence[PromptPart] = ()
    failed_prompts: Collection[SequenceId] = ()


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
    """Draw one token for each of the rows of `logits`, float32 [rows, vocab_size].

    A row fails if a logit is NaN or plus infinity, or all are minus infinity, masks included; single minus infinities
    are masked tokens. Raises `ValueError` for a row that draws at random and has no seed. `logits` are not changed.
    """
    own = logits
    edited = [i for i, row in enumerate(rows) if not row.is_plain]
    is_fit = [True] * len(rows)  # where a mask could hide that it is not
    if edited:
        for i, is_row_fit in zip(edited, logits[edited].amax(dim=-1).isfinite().tolist(), strict=True):
            is_fit[i] = is_row_fit
        logits = _edited(logits, rows)
    maxima, greedy = logits.max(dim=-1)
    is_finite = [fit and finite for fit, finite in zip(is_fit, maxima.isfinite().tolist(), strict=True)]  # a NaN is a maximum
    token_ids: list[int] = greedy.tolist()
    drawn = [i for i, row in enumerate(rows) if is_finite[i] and row.params.temperature >= GREEDY_BELOW]
    for group, draw in (
        ([i for i in drawn if not _filters_by_rank(rows[i].params)], _draw_from_all),
        ([i for i in drawn if _filters_by_rank(rows[i].params)], _draw_from_top),
    ):
        if group:
            mine = [rows[i] for i in group]
            scaled = (logits[group] - maxima[group, None]) / _column(logits, [row.params.temperature for row in mine])
            for i, token in zip(group, draw(scaled, mine), strict=True):
                token_ids[i] = token
    failed = [i for i, is_row_finite in enumerate(is_finite) if not is_row_finite]
    left_empty = maxima == -math.inf
    exhausted = [i for i in edited if is_fit[i] and left_empty[i]]
    return Sampled(token_ids, failed, row_logprobs(own, rows, token_ids, failed), exhausted)


def row_logprobs(
    logits: Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int], failed: Sequence[int]
) -> dict[int, TokenLogprobs]:
    """What the rows that ask for it drew their tokens from, by number; `logits` are the model's own."""
    without = set(failed)
    asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None and i not in without]
    if not asking:
        return {}
    counts = [rows[i].params.logprobs or 0 for i in asking]
    return dict(zip(asking, token_logprobs(logits[asking], [token_ids[i] for i in asking], counts), strict=True))


def _edited(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """A copy of `logits` with all masks, biases and penalties."""
    logits = logits.clone()
    apply_masks(logits, [(i, row.allowed_mask) for i, row in enumerate(rows) if row.allowed_mask is not None])
    apply_edits(logits, [(i, row.edits) for i, row in enumerate(rows) if row.edits is not None])
    return logits


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


def seeds_of(rows: Sequence[SamplingRow]) -> tuple[list[int], list[int], list[int]]:
    """What names the random number of each row, as `uniforms` takes it. Raises `ValueError` for a row without a seed."""
    seeds = [row.params.seed for row in rows]
    known = [seed for seed in seeds if seed is not None]
    if len(known) < len(seeds):
        raise ValueError("a row that samples at random has no seed")
    return known, [row.sequence for row in rows], [row.position for row in rows]


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
    """Draw where top-k or top-p filters: from the most likely tokens, in the order of the vocabulary."""
    weights = _weights(scaled, rows)
    size = weights.shape[-1]
    top, token_ids = weights.topk(min(_MAX_CANDIDATES, size), dim=-1)
    tokens, suffices = _draw_from_candidates(top, token_ids, weights, rows)
    for i in [i for i, enough in enumerate(suffices) if not enough]:
        every, every_id = weights[i : i + 1].sort(dim=-1, descending=True)
        tokens[i] = _draw_from_candidates(every, every_id, weights[i : i + 1], rows[i : i + 1])[0][0]
    return tokens


def _draw_from_candidates(
    top: Tensor, token_ids: Tensor, weights: Tensor, rows: list[SamplingRow]
) -> tuple[list[int], list[bool]]:
    """A token of `token_ids` [rows, candidates], whose weights `top` fall, for each row; and whether these sufficed."""
    count, suffices = _num_kept(top, weights, rows)
    least = top.gather(-1, count - 1)
    # Which of the tokens with the least weight are among the candidates is chance unless all are.
    suffices &= (top[:, -1:] < least) | (top.shape[-1] == weights.shape[-1])
    num_least = count - (top > least).sum(dim=-1, keepdim=True)
    token_ids, order = token_ids.sort(dim=-1)
    top = top.gather(-1, order)
    is_least = top == least
    kept = (top > least) | is_least & (is_least.cumsum(dim=-1) <= num_least)
    tokens: list[int] = token_ids.gather(-1, _pick(top.masked_fill(~kept, 0.0), rows)).flatten().tolist()
    return tokens, suffices.flatten().tolist()


def _weights(scaled: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Unnormalised probabilities after min-p; a row's largest is 1."""
    weights = scaled.exp()
    min_p = _column(weights, [row.params.min_p for row in rows])
    return weights.masked_fill_(weights < min_p, 0.0)


def _num_kept(top: Tensor, weights: Tensor, rows: list[SamplingRow]) -> tuple[Tensor, Tensor]:
    """How many of `top` [rows, candidates], the largest of `weights` in falling order, top-k and top-p keep: int64 [rows, 1].

    Also, bool [rows, 1], whether it is all that they keep: the mass that top-p is a share of is known, and made up.
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
    return ((mass - kept < goal) & (kept > 0)).sum(dim=-1, keepdim=True), suffices


def _total(weights: Tensor) -> Tensor:
    """Sum of each row in float64. A running sum, since its order does not depend on the number of rows or threads."""
    return weights.double().cumsum(dim=-1)[:, -1:]


def _pick(weights: Tensor, rows: list[SamplingRow]) -> Tensor:
    """The position of one draw a row, [rows, 1], by inverting the cumulative weights in float64.

    The first position whose cumulative weight exceeds u * total: never one of weight 0, and always
    one that exists, since u is below 1 and the product is rounded below the total.
    """
    numbers = uniforms(*seeds_of(rows))
    cumulative = weights.double().cumsum(dim=-1)
    target = cumulative[:, -1:] * torch.tensor(numbers, dtype=torch.float64, device=weights.device)[:, None]
    return torch.searchsorted(cumulative, target, right=True)


def _column(like: Tensor, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]
