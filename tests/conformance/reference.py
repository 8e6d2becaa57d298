"""What `transformers` alone answers, greedily, and how clearly it decided each token."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from repertory.gpu.models.source import demo_file

NUM_THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
"""Compute threads of both sides. One by default: test machines have few cores, and share them."""

CAN_READ_GGUF = importlib.util.find_spec("accelerate") is not None
"""Whether transformers reads GGUF files here: it does so only beside `accelerate`."""

_BATCH = 12
"""Prompts generated side by side, of similar lengths."""


@dataclass(frozen=True)
class Continuation:
    """A prompt and its greedy tokens, ends ignored. `gaps`: the largest logit of each step less the second largest."""

    prompt_ids: list[int]
    token_ids: list[int]
    gaps: list[float]

    def until(self, *, max_tokens: int, stop_ids: Sequence[int] = ()) -> list[int]:
        """The tokens of a request that may generate `max_tokens` and ends with the first of `stop_ids`."""
        token_ids = self.token_ids[:max_tokens]
        ends = [position for position, token in enumerate(token_ids) if token in stop_ids]
        return token_ids[: ends[0] + 1] if ends else token_ids


@contextmanager
def threads(number: int = NUM_THREADS) -> Iterator[None]:
    """Compute with `number` threads in here."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_directory(directory: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """A model directory, as transformers reads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def load_demo_file() -> Any:
    """The demo model's GGUF file, as transformers dequantises it to float32. Takes 13 s, and needs `accelerate`."""
    from transformers import AutoModelForCausalLM, GgufConfig

    file = demo_file()
    how = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=how
    ).eval()


def generated(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """`num_tokens` greedy tokens for each of the prompts, as one call of `generate`; shorter prompts are padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config.eos_token_id = None  # on past every end, which `Continuation.until` finds
    with threads(), torch.inference_mode():
        found = model.generate(
            ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0, use_cache=True
        )
    return found[:, longest:].tolist()


def proven(model: Any, prompt_ids: list[int], token_ids: list[int]) -> Continuation:
    """The continuation, if it is the one that the model run plainly gives: no batch, no padding, no cache.

    One forward over prompt and answer shows what follows each of its prefixes. If the largest logit after
    the prompt is the first token's, the largest after prompt and first token the second's, and so on, then
    greedy decoding with a whole forward a token gives this answer. Raises `AssertionError` otherwise.
    """
    with threads(), torch.inference_mode():
        logits = model(torch.tensor([prompt_ids + token_ids[:-1]]), logits_to_keep=len(token_ids)).logits[0]
    top = logits.topk(2)
    assert top.indices[:, 0].tolist() == token_ids, "the batched reference differs from a plain forward"
    return Continuation(prompt_ids, token_ids, (top.values[:, 0] - top.values[:, 1]).tolist())


def continuations(model: Any, prompts: Sequence[list[int]], num_tokens: int) -> list[Continuation]:
    """Greedy continuations of all prompts: generated in batches, since that is quicker, and each proven on its own."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found: dict[int, Continuation] = {}
    for begin in range(0, len(order), _BATCH):
        batch = order[begin : begin + _BATCH]
        answers = generated(model, [prompts[index] for index in batch], num_tokens)
        for index, token_ids in zip(batch, answers, strict=True):
            found[index] = proven(model, prompts[index], token_ids)
    return [found[index] for index in range(len(prompts))]
