"""How likely the tokens of a step were: from the model's own logits, before temperature and filters, in float32.

What a prompt's tokens followed on is computed for all of them only where a request asks for it, a slice of them at a time:
the logits of a whole chunk would be as large as the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..protocol.ids import SequenceId
from ..protocol.messages import PromptPart, TokenLogprobs
from .prompts import PromptRow

PROMPT_SLICE = 64
"""Positions whose logits are in memory at a time."""


def prompt_parts(
    asking: Sequence[PromptRow], logits: Callable[[int, int], Tensor]
) -> tuple[list[PromptPart], list[SequenceId]]:
    """How likely the targets of each row were, and the sequences of rows whose logits were not all finite.

    `logits(first, last)` are those of the step's tokens [first, last), float32 [last - first, vocab_size], and may be
    overwritten by the next call.
    """
    parts: list[PromptPart] = []
    failed: list[SequenceId] = []
    for one in asking:
        seq_id = one.row.slot.seq_id
        entries: list[TokenLogprobs] = []
        is_fit = True
        for start in range(0, len(one.targets), PROMPT_SLICE):
            targets = one.targets[start : start + PROMPT_SLICE]
            first = one.token + start
            found = logits(first, first + len(targets))
            is_fit = is_fit and bool(found.amax(dim=-1).isfinite().all())  # a NaN is a maximum
            entries += token_logprobs(found, targets, [one.num_likeliest] * len(targets))
        if is_fit:
            parts.append(PromptPart(seq_id, one.first, entries))
        else:
            failed.append(seq_id)
    return parts, failed


def token_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Of each row of `logits`, float32 [rows, vocab_size], what `token_ids` was drawn from: its own and the `counts` likeliest.

    Natural logarithms of the softmax; the rank of a token is one more than the number of tokens that are more likely.
    The rows must be finite (single minus infinities are). A count may be larger than the vocabulary.
    """
    logprobs = logits - logits.logsumexp(dim=-1, keepdim=True)
    sampled = logprobs.gather(-1, logprobs.new_tensor(token_ids, dtype=torch.int64)[:, None])
    ranks = (logprobs > sampled).sum(dim=-1) + 1
    top, top_ids = logprobs.topk(min(max(counts), logits.shape[-1]), dim=-1)
    columns = zip(token_ids, counts, sampled.flatten().tolist(), ranks.tolist(), top.tolist(), top_ids.tolist(), strict=True)
    return [
        TokenLogprobs([token, *likeliest_ids[:count]], [own, *likeliest[:count]], rank)
        for token, count, own, rank, likeliest, likeliest_ids in columns
    ]
