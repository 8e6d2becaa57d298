"""How likely the tokens of a step were: from the model's own logits, before temperature and filters, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..protocol.messages import TokenLogprobs


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
