"""The decoder against `transformers` on the same weights, float32, through pages, chunks and batches."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from repertory.gpu.cpu.attention import PagedAttention
from repertory.gpu.cpu.pool import KvPool
from repertory.gpu.cpu.torch_path import flat_batch
from repertory.gpu.models.config import load_model_config
from repertory.gpu.models.decoder import Batch, Decoder
from repertory.gpu.models.weights import load_weights
from repertory.gpu.slots import Row, Slot
from repertory.protocol.ids import SequenceId
from repertory.protocol.messages import NewRow
from repertory.protocol.sampling import SamplingParams
from repertory.tests.tiny_model import make_tiny_model

ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
PROMPTS = [random.Random(n).choices(range(320), k=n) for n in (1, 23, 40, 16)]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tied = request.param != "MistralForCausalLM"
    return make_tiny_model(tmp_path_factory.mktemp("model"), architecture=request.param, tie_word_embeddings=tied)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> list[Tensor]:
    return reference_logits(model_dir, PROMPTS)


def reference_logits(model_dir: Path, prompts: list[list[int]]) -> list[Tensor]:
    """Logits of every position of each prompt, computed by transformers alone."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


def paged_logits(
    model_dir: Path, prompts: list[list[int]], *, chunk: int, block_size: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Logits of every position, the prompts side by side in chunks, over scattered blocks of a pool full of NaN."""
    config = load_model_config(model_dir)
    decoder = Decoder(config, load_weights(model_dir, config, dtype=dtype, device=torch.device("cpu")))
    needed = [-(-len(prompt) // block_size) for prompt in prompts]
    pool = KvPool(config, num_blocks=sum(needed) + 5, block_size=block_size, dtype=dtype)
    pool.blocks.fill_(float("nan"))
    free = random.Random(3).sample(range(sum(needed) + 5), sum(needed))
    slots = [
        Slot(NewRow(SequenceId(i), prompt, len(prompt), SamplingParams(), [free.pop() for _ in range(blocks)]))
        for i, (prompt, blocks) in enumerate(zip(prompts, needed, strict=True))
    ]
    found: list[list[Tensor]] = [[] for _ in prompts]
    with torch.inference_mode():
        for start in range(0, max(map(len, prompts)), chunk):
            active = [slot for slot in slots if start < len(slot.token_ids)]
            rows = [Row(slot, start, min(start + chunk, len(slot.token_ids)), 1) for slot in active]
            flat = flat_batch(rows)
            every = Batch(flat.token_ids, flat.positions, torch.arange(len(flat.token_ids)))
            logits = decoder.forward(every, PagedAttention(pool, rows))
            for row, part in zip(rows, logits.split([row.end - row.start for row in rows]), strict=True):
                found[row.slot.seq_id].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_batched_and_paged_logits_equal_a_plain_forward(
    model_dir: Path, reference: list[Tensor], chunk: int, block_size: int
) -> None:
    found = paged_logits(model_dir, PROMPTS, chunk=chunk, block_size=block_size)
    for ours, theirs in zip(found, reference, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_the_comparison_would_notice_a_wrong_position(model_dir: Path, reference: list[Tensor]) -> None:
    shifted = paged_logits(model_dir, [[5, *PROMPTS[2][1:]]], chunk=64, block_size=16)[0]
    assert (shifted[-1] - reference[2][-1]).abs().max() > 1e-2


def test_half_precision_stays_close_to_the_reference(model_dir: Path, reference: list[Tensor]) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        found = paged_logits(model_dir, PROMPTS, chunk=7, block_size=4, dtype=dtype)
        for ours, theirs in zip(found, reference, strict=True):
            assert ours.dtype == torch.float32
            assert (ours - theirs).abs().max() < 0.15 * theirs.abs().max()


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_llama3_rope_scaling_equals_transformers_in_both_spellings(tmp_path: Path, spelling: str) -> None:
    make_tiny_model(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    theta = raw.pop("rope_theta")
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    raw |= (
        {"rope_theta": theta, "rope_scaling": scaling}
        if spelling == "rope_scaling"
        else {"rope_parameters": {"rope_theta": theta, **scaling}}
    )
    (tmp_path / "config.json").write_text(json.dumps(raw))
    prompt = random.Random(1).choices(range(320), k=200)
    ours = paged_logits(tmp_path, [prompt], chunk=33, block_size=16)[0]
    torch.testing.assert_close(ours, reference_logits(tmp_path, [prompt])[0], atol=1e-4, rtol=0)
