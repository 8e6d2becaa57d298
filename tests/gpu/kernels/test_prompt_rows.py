"""Rows whose prompt is asked about: the same entries in the C kernels as in torch, and the same draws beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from repertory.gpu.cpu.kernel_path import KernelPath
from repertory.gpu.cpu.pool import KvPool
from repertory.gpu.cpu.torch_path import TorchPath
from repertory.gpu.models.config import load_model_config
from repertory.gpu.models.decoder import Decoder
from repertory.gpu.models.weights import load_weights
from repertory.gpu.sampling import Sampled, SamplingRow
from repertory.gpu.slots import Row, Slot
from repertory.protocol.ids import SequenceId
from repertory.protocol.messages import NewRow
from repertory.protocol.sampling import SamplingParams
from repertory.tests.gpu.kernels.calls import KERNELS, LIBRARY, Kernel
from repertory.tests.tiny_model import make_tiny_model

PLAIN = SamplingParams(temperature=0.0)
ASKING = SamplingParams(temperature=0.0, prompt_logprobs=3)
DRAWING = SamplingParams(temperature=1.0, seed=4, logprobs=2, prompt_logprobs=0)
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), heads=6, kv_heads=2, head_dim=64, hidden=96, vocab_size=331)


def open_path(directory: Path, kernel: Kernel | None, threads: int = 1) -> tuple[TorchPath | KernelPath, KvPool]:
    config, dtype = load_model_config(directory), kernel[1] if kernel else torch.float32
    weights = load_weights(directory, config, dtype=dtype, device=torch.device("cpu"))
    pool = KvPool(config, num_blocks=64, block_size=BLOCK_SIZE, dtype=dtype)
    pool.blocks.fill_(float("nan"))
    if kernel is None:
        return TorchPath(Decoder(config, weights), pool, description=""), pool
    return KernelPath(LIBRARY, kernel[0], config, weights, pool, num_threads=threads), pool


def slot_of(number: int, num_tokens: int, params: SamplingParams, num_prompt_tokens: int | None = None) -> Slot:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, 320, (num_tokens,), generator=generator).tolist()
    table = list(range(number * 12, number * 12 + 12))
    return Slot(NewRow(SequenceId(number), tokens, num_prompt_tokens or num_tokens, params, table))


def steps() -> list[list[Row]]:
    """Chunks with and without samples between others; prompts that end within a row, before it, and behind it."""
    plain, asking, drawing, resumed = (
        slot_of(0, 30, PLAIN), slot_of(1, 150, ASKING), slot_of(2, 40, DRAWING), slot_of(3, 60, ASKING, 50)
    )  # fmt: skip
    return [
        [Row(plain, 0, 29, 0), Row(asking, 0, 70, 0), Row(drawing, 0, 40, 1), Row(resumed, 0, 10, 0)],
        [Row(plain, 29, 30, 1), Row(asking, 70, 71, 0), Row(resumed, 10, 60, 1)],
        [Row(asking, 71, 150, 1)],
    ]


def run(path: TorchPath | KernelPath, rows: list[Row]) -> Sampled:
    draws = [SamplingRow(row.slot.params, 0, 0) for row in rows if row.samples]
    return path.compute(rows, draws, [])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_say_what_torch_says(directory: Path, kernel: Kernel, threads: int) -> None:
    ours, theirs = open_path(directory, kernel, threads)[0], open_path(directory, None)[0]
    for rows in steps():
        found, expected = run(ours, rows), run(theirs, rows)
        assert [(part.seq_id, part.first, len(part.entries)) for part in found.prompts] == [
            (part.seq_id, part.first, len(part.entries)) for part in expected.prompts
        ]
        for one, other in zip(found.prompts, expected.prompts, strict=True):
            ours_flat, theirs_flat = (
                torch.tensor([value for entry in part.entries for value in entry.logprobs]) for part in (one, other)
            )
            if kernel[1] is torch.float32:
                torch.testing.assert_close(ours_flat, theirs_flat, atol=1e-4, rtol=1e-4)
                assert [entry.token_ids for entry in one.entries] == [entry.token_ids for entry in other.entries]
            else:
                assert (ours_flat - theirs_flat).abs().mean() < 0.15
        assert kernel[1] is not torch.float32 or found.token_ids == expected.token_ids
    ours.close()


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_drawn_beside_a_prompt_is_what_is_drawn_without(directory: Path, kernel: Kernel) -> None:
    first, second = open_path(directory, kernel)[0], open_path(directory, kernel)[0]
    for rows in steps():
        silent = [
            row._replace(slot=slot_of(row.slot.seq_id, len(row.slot.token_ids), PLAIN, row.slot.num_prompt_tokens))
            for row in rows
        ]
        draws = [SamplingRow(row.slot.params, 0, 0) for row in rows if row.samples]
        asked, unasked = first.compute(rows, draws, []), second.compute(silent, draws, [])
        assert asked.token_ids == unasked.token_ids
        assert not unasked.prompts
    first.close()
    second.close()


@pytest.mark.parametrize("kernel", [None, KERNELS[0]], ids=["torch", "kernels"])
def test_a_prompt_that_is_not_finite_fails_its_sequence_alone(directory: Path, kernel: Kernel | None) -> None:
    path, pool = open_path(directory, kernel)
    bad, good = slot_of(0, 40, ASKING), slot_of(1, 40, ASKING)
    run(path, [Row(bad, 0, 20, 0), Row(good, 0, 20, 0)])
    pool.blocks[bad.block_table[0], 1, 0, 3] = float("nan")
    found = run(path, [Row(bad, 20, 30, 0), Row(good, 20, 40, 1)])
    assert list(found.failed_prompts) == [0]
    assert [part.seq_id for part in found.prompts] == [1]
    assert found.failed == []
    path.close()
