"""What the parameters mean, written down once more: transformers' processors where there are some, else a line of numpy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from repertory.gpu.sampling import SamplingRow
from repertory.gpu.sampling_edits import LogitEdits
from repertory.protocol.ids import SequenceId
from repertory.protocol.messages import Barred, NewRow
from repertory.protocol.sampling import SamplingParams


def edits_of(params: SamplingParams, prompt: list[int], output: list[int], barred: Barred | None = None) -> LogitEdits | None:
    """As a slot has them after `output`."""
    row = NewRow(SequenceId(1), [*prompt, *output], len(prompt), params, [], barred=barred)
    edits = LogitEdits.of(row)
    if edits is not None:
        edits.catch_up(row.token_ids)
    return edits


def row_of(
    params: SamplingParams, prompt: list[int], output: list[int], barred: Barred | None = None, *, position: int | None = None
) -> SamplingRow:
    """A row that samples after `output`."""
    edits = edits_of(params, prompt, output, barred)
    return SamplingRow(params, 0, len(output) if position is None else position, edits)


def expected_logits(
    logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int], barred: Barred | None = None
) -> Tensor:
    """`logits` [vocab_size] with everything that comes before temperature."""
    edited = logits.clone()
    barred = barred or Barred()
    if params.allowed_token_ids is not None:
        others = torch.ones(len(logits), dtype=torch.bool)
        others[params.allowed_token_ids] = False
        edited[others] = -torch.inf
    if barred.bad_words:
        # One that is no longer than the output: the processor asks for as many tokens.
        words = [word for word in barred.bad_words if len(word) <= len(output) + 1]
        if words:
            edited = NoBadWordsLogitsProcessor(words)(torch.tensor([output], dtype=torch.long), edited[None])[0]
    if len(output) < params.min_tokens:
        edited[barred.ends] = -torch.inf
    for token, bias in (params.logit_bias or {}).items():
        edited[token] += bias
    if params.repetition_penalty != 1.0:
        seen = torch.tensor([[*prompt, *output]])
        edited = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(seen, edited[None])[0]
    counts = np.bincount(np.array(output, dtype=np.int64), minlength=len(logits))
    return edited - torch.from_numpy(params.frequency_penalty * counts + params.presence_penalty * (counts > 0)).float()
