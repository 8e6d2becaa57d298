"""Log-probabilities of a bfloat16 executor, teacher-forced, against plain torch in float32.

Texts would part at the first near tie, so every position is asked about a text that is given. Three ways through the device:

    chunks            the prompt's own log-probabilities, a chunk of it in each step
    decodes           for each position a new sequence over the same blocks, whose last token is the one row it computes
    captured decodes  the same without asking for log-probabilities, so that captured steps run: the token alone

The yardstick is plain torch in bfloat16: what that differs from float32 by is what the format costs.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from repertory.protocol.ids import BlockId, SequenceId
from repertory.protocol.messages import StepDone, TokenLogprobs
from repertory.protocol.sampling import SamplingParams

from ..driving import GREEDY, Driver
from ..gpu import Gpu
from ..plain import PlainLlama
from ..report import Report
from ..shapes import SMOLLM2, TAME, TINY, write_model

NUM_LIKELIEST = 20
ALLOWED = 3.0
"""Times what bfloat16 costs plain torch: sums are made in another order, and rounded in other places."""

CHUNK = 48


class Text(NamedTuple):
    """A text's tokens, and blocks that have room for them."""

    token_ids: list[int]
    blocks: list[BlockId]


def run(report: Report, gpu: Gpu) -> None:
    """The part."""
    shape = gpu.sized(SMOLLM2, TINY)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), shape._replace(tie_word_embeddings=False), spread=gpu.sized(TAME, 0.12))
        report.say("model written")
        num_texts, length = gpu.sized((8, 160), (2, 40))
        texts = [random.Random(number).choices(range(3, shape.vocab_size), k=length) for number in range(num_texts)]
        exact = PlainLlama(model, device=gpu.device).logits(texts).log_softmax(-1)
        plain = PlainLlama(model, device=gpu.device, dtype=torch.bfloat16).logits(texts).float().log_softmax(-1)
        config = gpu.config(
            model, dtype="bfloat16", max_model_len=256, max_num_batched_tokens=256, max_num_seqs=16, num_device_blocks=1024,
            num_host_blocks=0,
        )  # fmt: skip
        executor, _ = gpu.open(config)
        try:
            _compare(report, Driver(executor), texts, exact, plain)
        finally:
            executor.close()


def _compare(report: Report, driver: Driver, texts: list[list[int]], exact: Tensor, plain: Tensor) -> None:
    cost = float((plain - exact).abs().max())
    agreeing = float((plain.argmax(-1) == exact.argmax(-1)).float().mean())
    report.figure("plain torch: log-probabilities from float32 by", cost, "", note=f"{agreeing:.1%} of argmaxes equal")
    with_blocks = [Text(token_ids, driver.blocks_for(len(token_ids))) for token_ids in texts]
    _judge(report, "chunks", _of_chunks(driver, with_blocks), exact, cost)
    _judge(report, "decodes", _of_decodes(driver, with_blocks), exact, cost)
    tokens = _tokens_of_decodes(driver, with_blocks)
    gaps = _gaps(exact, tokens)
    agreement = float((gaps == 0).float().mean())
    report.right(
        "captured decodes: argmaxes equal", bool(gaps.max() <= 2 * ALLOWED * cost), value=100 * agreement, unit="%",
        note=f"others within {2 * ALLOWED * cost:.2g}; furthest {float(gaps.max()):.2g}",
    )  # fmt: skip


def _judge(report: Report, way: str, found: list[list[TokenLogprobs | None]], exact: Tensor, cost: float) -> None:
    """`found[text][position]` is what follows on that position, None where nobody asked."""
    largest, same, count = 0.0, 0, 0
    for text, entries in enumerate(found):
        for position, entry in enumerate(entries):
            if entry is None:
                continue
            ids = torch.tensor(entry.token_ids, device=exact.device)
            theirs = exact[text, position, ids]
            difference = float((theirs - torch.tensor(entry.logprobs, device=exact.device)).abs().max())
            largest = max(largest, difference)
            likeliest = entry.token_ids[1]
            same += likeliest == int(exact[text, position].argmax())
            count += 1
    report.right(
        f"{way}: log-probabilities from float32 by", largest <= ALLOWED * cost, value=largest,
        note=f"at most {ALLOWED * cost:.2g}, {ALLOWED:g} times plain torch's; {same / count:.1%} of {count} argmaxes equal",
    )  # fmt: skip


def _of_chunks(driver: Driver, texts: Sequence[Text]) -> list[list[TokenLogprobs | None]]:
    params = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=NUM_LIKELIEST)
    ids = [driver.admit(text.token_ids, params=params, blocks=text.blocks) for text in texts]
    found: list[list[TokenLogprobs | None]] = [[None] * len(text.token_ids) for text in texts]
    for done in driver.prefill(ids, budget=CHUNK).done:
        for part in done.prompts:
            # What is said of the token at `first` follows on the one before it.
            place = slice(part.first - 1, part.first - 1 + len(part.entries))
            found[ids.index(part.seq_id)][place] = part.entries
    driver.launch({}, released=ids).result()
    return found


def _of_decodes(driver: Driver, texts: Sequence[Text]) -> list[list[TokenLogprobs | None]]:
    params = SamplingParams(temperature=0.0, seed=0, logprobs=NUM_LIKELIEST)
    steps = _decode_all(driver, texts, params)
    return [[done.logprobs[text] for done in steps] for text in range(len(texts))]


def _tokens_of_decodes(driver: Driver, texts: Sequence[Text]) -> Tensor:
    """int64 [texts, positions]."""
    return torch.tensor([done.token_ids for done in _decode_all(driver, texts, GREEDY)]).T


def _decode_all(driver: Driver, texts: Sequence[Text], params: SamplingParams) -> list[StepDone]:
    """A step for each position, in which every text computes that token, over blocks that hold those before it."""
    before: list[SequenceId] = []
    steps = []
    for position in range(len(texts[0].token_ids)):
        ids = [
            driver.admit(text.token_ids[: position + 1], params=params, blocks=text.blocks, computed=position) for text in texts
        ]
        steps.append(driver.launch(dict.fromkeys(ids, 1), released=before).result())
        before = ids
    driver.launch({}, released=before).result()
    return steps


def _gaps(exact: Tensor, tokens: Tensor) -> Tensor:
    """How much less likely each token is than the likeliest."""
    own = exact.gather(-1, tokens.to(exact.device)[..., None])[..., 0]
    return exact.amax(-1) - own
