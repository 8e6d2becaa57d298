"""Log-probabilities of a bfloat16 executor, teacher-forced, against plain torch in float32.

Texts would part at the first near tie, so every position is asked about a text that is given (`forcing.py`). The yardstick is
plain torch in bfloat16: what that differs from float32 by is what the format costs.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from ..driving import Driver
from ..forcing import NUM_LIKELIEST, Entries, by_chunks, by_decodes, compared, tokens_by_decodes, with_blocks
from ..gpu import Gpu
from ..plain import PlainLlama
from ..report import Report
from ..shapes import write_tame

ALLOWED = 3.0
"""Times what bfloat16 costs plain torch: sums are made in another order, and rounded in other places."""


def run(report: Report, gpu: Gpu) -> None:
    """The part."""
    num_texts, length = gpu.sized((8, 160), (2, 40))
    with tempfile.TemporaryDirectory() as folder:
        model, vocab_size = write_tame(gpu, Path(folder))
        report.say("model written")
        texts = [random.Random(number).choices(range(3, vocab_size), k=length) for number in range(num_texts)]
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


def _compare(report: Report, driver: Driver, token_ids: list[list[int]], exact: Tensor, plain: Tensor) -> None:
    likeliest = exact.topk(NUM_LIKELIEST).indices
    cost = float((plain - exact).gather(-1, likeliest).abs().max())
    agreeing = float((plain.argmax(-1) == exact.argmax(-1)).float().mean())
    report.figure("plain torch: log-probabilities from float32 by", cost, "", note=f"{agreeing:.1%} of argmaxes equal")
    texts = with_blocks(driver, token_ids)
    _judge(report, "chunks", by_chunks(driver, texts), exact, cost)
    _judge(report, "decodes", by_decodes(driver, texts), exact, cost)
    gaps = _gaps(exact, tokens_by_decodes(driver, texts))
    agreement = float((gaps == 0).float().mean())
    report.right(
        "captured decodes: argmaxes equal", bool(gaps.max() <= 2 * ALLOWED * cost), value=100 * agreement, unit="%",
        note=f"others within {2 * ALLOWED * cost:.2g}; furthest {float(gaps.max()):.2g}",
    )  # fmt: skip


def _judge(report: Report, way: str, found: Entries, exact: Tensor, cost: float) -> None:
    result = compared(found, exact)
    note = f"at most {ALLOWED * cost:.2g}, {ALLOWED:g} times plain torch's; {result.agreement:.1%} of argmaxes equal"
    report.right(f"{way}: log-probabilities from float32 by", result.largest <= ALLOWED * cost, value=result.largest, note=note)


def _gaps(exact: Tensor, tokens: Tensor) -> Tensor:
    """How much less likely each token is than the likeliest."""
    own = exact.gather(-1, tokens.to(exact.device)[..., None])[..., 0]
    return exact.amax(-1) - own
