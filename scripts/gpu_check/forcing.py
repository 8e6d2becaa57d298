"""What an executor says follows on each position of texts that are given: nothing that it draws leads it elsewhere.

chunks    the prompt's own log-probabilities, a chunk of it in each step
decodes   for each position a new sequence over the same blocks, whose last token is the one row that it computes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from repertory.protocol.ids import BlockId, SequenceId
from repertory.protocol.messages import StepDone, TokenLogprobs
from repertory.protocol.sampling import SamplingParams

from .driving import GREEDY, Driver

NUM_LIKELIEST = 20
CHUNK = 48

Entries = list[list[TokenLogprobs | None]]
"""By text and position: what follows on it, first the token drawn or given, then the likeliest; None where nobody asked."""


class Text(NamedTuple):
    """A text's tokens, and blocks that have room for them."""

    token_ids: list[int]
    blocks: list[BlockId]


class Compared(NamedTuple):
    """Log-probabilities of the likeliest tokens against exact ones: how far they are, and argmaxes that are equal."""

    largest: float
    mean: float
    num_same: int
    num_positions: int

    @property
    def agreement(self) -> float:
        """The share of equal argmaxes."""
        return self.num_same / self.num_positions


def with_blocks(driver: Driver, texts: Sequence[list[int]]) -> list[Text]:
    """Texts, with blocks on the device."""
    return [Text(token_ids, driver.blocks_for(len(token_ids))) for token_ids in texts]


def by_chunks(driver: Driver, texts: Sequence[Text]) -> Entries:
    """All positions but each text's last."""
    params = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=NUM_LIKELIEST)
    ids = [driver.admit(text.token_ids, params=params, blocks=text.blocks) for text in texts]
    found: Entries = [[None] * len(text.token_ids) for text in texts]
    for done in driver.prefill(ids, budget=CHUNK).done:
        for part in done.prompts:
            # What is said of the token at `first` follows on the one before it.
            place = slice(part.first - 1, part.first - 1 + len(part.entries))
            found[ids.index(part.seq_id)][place] = part.entries
    driver.launch({}, released=ids).result()
    return found


def by_decodes(driver: Driver, texts: Sequence[Text]) -> Entries:
    """All positions. Raises `RuntimeError` if a row fails."""
    steps = _decode_all(driver, texts, SamplingParams(temperature=0.0, seed=0, logprobs=NUM_LIKELIEST))
    return [[done.logprobs[text] for done in steps] for text in range(len(texts))]


def tokens_by_decodes(driver: Driver, texts: Sequence[Text]) -> Tensor:
    """int64 [texts, positions]: the likeliest, by steps that are asked for nothing else and so may be captured ones."""
    return torch.tensor([done.token_ids for done in _decode_all(driver, texts, GREEDY)]).T


def compared(found: Entries, exact: Tensor) -> Compared:
    """`exact` are log-probabilities [texts, positions, vocab_size]."""
    differences: list[Tensor] = []
    same = 0
    for text, entries in enumerate(found):
        for position, entry in enumerate(entries):
            if entry is None:
                continue
            ids = torch.tensor(entry.token_ids, device=exact.device)
            said = torch.tensor(entry.logprobs, device=exact.device)
            differences.append((exact[text, position, ids] - said).abs())
            same += entry.token_ids[1] == int(exact[text, position].argmax())
    every = torch.cat(differences)
    return Compared(float(every.max()), float(every.mean()), same, len(differences))


def _decode_all(driver: Driver, texts: Sequence[Text], params: SamplingParams) -> list[StepDone]:
    """A step for each position, in which every text computes that token, over blocks that hold those before it."""
    before: list[SequenceId] = []
    steps = []
    for position in range(len(texts[0].token_ids)):
        ids = [
            driver.admit(text.token_ids[: position + 1], params=params, blocks=text.blocks, computed=position) for text in texts
        ]
        done = driver.launch(dict.fromkeys(ids, 1), released=before).result()
        if done.failed:
            raise RuntimeError(f"position {position}: {done.failed[0]}")
        steps.append(done)
        before = ids
    driver.launch({}, released=before).result()
    return steps
