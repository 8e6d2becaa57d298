"""Whole steps in the C kernels against the same steps in torch, on tiny models over a pool full of NaN."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from repertory.gpu.cpu import plan
from repertory.gpu.cpu.attention import PagedAttention
from repertory.gpu.cpu.kernel_path import KernelPath
from repertory.gpu.cpu.pool import KvPool
from repertory.gpu.cpu.torch_path import flat_batch
from repertory.gpu.models.config import ModelConfig, load_model_config
from repertory.gpu.models.decoder import Decoder
from repertory.gpu.models.weights import load_weights
from repertory.gpu.sampling import SamplingRow
from repertory.gpu.slots import Row, Slot
from repertory.protocol.ids import SequenceId
from repertory.protocol.messages import NewRow
from repertory.protocol.sampling import SamplingParams
from repertory.tests.gpu.kernels.calls import KERNELS, LIBRARY, Kernel, scattered
from repertory.tests.tiny_model import make_tiny_model

GREEDY = SamplingParams(temperature=0.0, seed=0)
RANDOM = SamplingParams(temperature=1.0, seed=0)
SHAPES = [(4, 4, 64, 64), (6, 2, 64, 96), (8, 1, 96, 64), (3, 1, 128, 128)]
"""Heads, KV heads, head_dim, hidden size."""


class Side:
    """One way to compute: its pool, and logits of steps over it."""

    def __init__(
        self,
        directory: Path,
        kernel: Kernel | None,
        *,
        block_size: int,
        dtype: torch.dtype,
        threads: int = 1,
        library: Any = LIBRARY,
    ) -> None:
        self.config: ModelConfig = load_model_config(directory)
        weights = load_weights(directory, self.config, dtype=dtype, device=torch.device("cpu"))
        self.pool = KvPool(self.config, num_blocks=900 // block_size + 12, block_size=block_size, dtype=dtype)
        self.pool.blocks.fill_(float("nan"))
        self.path: KernelPath | None = None
        if kernel:
            self.path = KernelPath(library, kernel[0], self.config, weights, self.pool, num_threads=threads)
        else:
            self.decoder = Decoder(self.config, weights)

    def logits(self, rows: list[Row], shared: list[tuple[list[int], int]] | None = None) -> Tensor:
        samples = [row for row in rows if row.samples]
        if self.path is None:
            with torch.inference_mode():
                return self.decoder.forward(flat_batch(rows), PagedAttention(self.pool, rows))
        self.path.compute(rows, [SamplingRow(RANDOM, 0, 0)] * len(samples), shared or [])
        return self.path.logits(len(samples)).clone()


def slots_for(side: Side, lengths: list[int], *, prefix: int = 0) -> list[Slot]:
    """Sequences of random tokens on scattered blocks; the first `prefix` tokens and their blocks are the same for all."""
    rng, size = random.Random(5), side.pool.block_size
    free = scattered(len(side.pool.blocks), seed=2)
    shared, blocks = rng.choices(range(3, 320), k=prefix), [free.pop() for _ in range(prefix // size)]
    slots = []
    for i, length in enumerate(lengths):
        tokens = shared + rng.choices(range(3, 320), k=length - prefix)
        table = blocks + [free.pop() for _ in range(-(-length // size) - len(blocks))]
        slots.append(Slot(NewRow(SequenceId(i), tokens, length, GREEDY, table)))
    return slots


def mixed_steps(slots: list[Slot]) -> list[list[Row]]:
    """Chunks, then decodes and chunks together, some of them without samples, then decodes, chunks of two and more."""
    long, short, *others = slots
    first = [Row(long, 0, 30, 0), Row(short, 0, len(short.token_ids) - 2, 1)]
    second = [Row(short, first[1].end, first[1].end + 1, 1), Row(long, 30, 64, 0), *(Row(slot, 0, 1, 1) for slot in others)]
    third = [Row(slot, 1, len(slot.token_ids) - 1, i % 2) for i, slot in enumerate(others)]
    fourth = [Row(long, 64, 65, 1), *(Row(slot, len(slot.token_ids) - 1, len(slot.token_ids), 1) for slot in others)]
    rest = [(65, 66, 0), (66, 68, 1), (68, 71, 1), (71, 75, 0), (75, 76, 1)]
    return [first, second, third, fourth, *([Row(long, *places)] for places in rest)]


def check_steps(directory: Path, kernel: Kernel, *, block_size: int, threads: int = 1) -> None:
    """Against torch in float32; bfloat16 must not be further from it than torch in bfloat16 is."""
    side = Side(directory, kernel, block_size=block_size, dtype=kernel[1], threads=threads)
    reference, rounded = (Side(directory, None, block_size=block_size, dtype=dtype) for dtype in (torch.float32, kernel[1]))
    slots = slots_for(side, [80, 20, 3, 18, 33, 50])
    errors = []
    for rows in mixed_steps(slots):
        ours, exact, theirs = side.logits(rows), reference.logits(rows), rounded.logits(rows)
        if kernel[1] is torch.float32:
            torch.testing.assert_close(ours, exact, atol=1e-4, rtol=1e-5)
        errors.append(torch.stack([(ours - exact).abs().sum(), (theirs - exact).abs().sum()]))
    our_error, their_error = torch.stack(errors).sum(0)
    assert kernel[1] is torch.float32 or our_error < 1.3 * their_error
    assert side.path
    side.path.close()


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads, kv_heads, head_dim, hidden = request.param
    return make_tiny_model(
        tmp_path_factory.mktemp("model"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        vocab_size=331,
        tie_word_embeddings=heads != 4,
        architecture="MistralForCausalLM" if heads == 4 else "LlamaForCausalLM",
    )


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("small"), heads=6, kv_heads=2, head_dim=64, hidden=96)


@pytest.mark.parametrize("kernel", KERNELS)
def test_mixed_steps_equal_torch(model_dir: Path, kernel: Kernel) -> None:
    check_steps(model_dir, kernel, block_size=16)


@pytest.mark.parametrize("block_size", [1, 4, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_mixed_steps_equal_torch_for_any_block_size(small_dir: Path, kernel: Kernel, block_size: int) -> None:
    check_steps(small_dir, kernel, block_size=block_size)


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("kernel", KERNELS)
def test_several_threads_find_what_one_finds(small_dir: Path, kernel: Kernel, threads: int) -> None:
    check_steps(small_dir, kernel, block_size=16, threads=threads)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kernel", KERNELS)
def test_sharing_a_prefix_changes_no_logit(
    small_dir: Path, kernel: Kernel, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "worth_sharing", lambda *sizes: True)
    prefix, lengths = 64, [65, 66, 70, 96, 97, 81, 80, 130]
    plain, grouped = (Side(small_dir, kernel, block_size=16, dtype=kernel[1], threads=threads) for _ in range(2))
    slots = slots_for(plain, lengths, prefix=prefix)
    fill = [Row(slots[0], 0, 64, 0), *(Row(slot, 64, n - 1, 0) for slot, n in zip(slots, lengths, strict=True) if n > 65)]
    decode = [Row(slot, n - 1, n, 1) for slot, n in zip(slots, lengths, strict=True)]
    for side in (plain, grouped):
        side.logits(fill)
    # A chunk is no decode and takes no part; a row may be named by several groups.
    expected = plain.logits(decode)
    found = grouped.logits(decode, shared=[([0, 1, 2, 3, 4, 5, 6], 4), ([6, 7], 4)])
    assert grouped.path and grouped.path.seconds["shared"] > 0
    atol, rtol = (1e-4, 1e-5) if kernel[1] is torch.float32 else (0.3, 0.05)
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)
    assert plain.path
    plain.path.close()
    grouped.path.close()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_nan_fails_its_row_alone(small_dir: Path, kernel: Kernel) -> None:
    side = Side(small_dir, kernel, block_size=16, dtype=kernel[1])
    assert side.path
    slots = slots_for(side, [20, 30, 40])
    side.logits([Row(slot, 0, len(slot.token_ids) - 1, 0) for slot in slots])
    rows = [Row(slot, len(slot.token_ids) - 1, len(slot.token_ids), 1) for slot in slots]
    draws = [SamplingRow(GREEDY, 0, 0)] * 3
    good = side.path.compute(rows, draws, [])
    side.pool.blocks[slots[1].block_table[0], 1, 0, 3] = float("nan")
    bad = side.path.compute(rows, draws, [])
    assert (good.failed, bad.failed) == ([], [1])
    assert [bad.token_ids[i] for i in (0, 2)] == [good.token_ids[i] for i in (0, 2)]
    random_draws = [SamplingRow(SamplingParams(temperature=1.0, seed=3), 0, 0)] * 3
    assert side.path.compute(rows, random_draws, []).failed == [1]
    side.path.close()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kernel", KERNELS)
def test_greedy_tokens_are_the_argmax_of_the_logits(small_dir: Path, kernel: Kernel, threads: int) -> None:
    side = Side(small_dir, kernel, block_size=4, dtype=kernel[1], threads=threads)
    assert side.path
    slots = slots_for(side, [20, 30] * 10)
    rows = [Row(slot, 0, len(slot.token_ids), 1) for slot in slots]
    greedy = side.path.compute(rows, [SamplingRow(GREEDY, 0, 0)] * 20, [])
    assert greedy.token_ids == side.logits(rows).argmax(-1).tolist()
    mixed = side.path.compute(rows, [SamplingRow(GREEDY, 0, 0)] + [SamplingRow(RANDOM, 0, 0)] * 19, [])
    assert mixed.token_ids[0] == greedy.token_ids[0]
    side.path.close()


class TimedLibrary:
    """The library, with the time that its steps take on the outside."""

    def __init__(self) -> None:
        self.step_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(LIBRARY, name)

    def run_step(self, *arguments: Any) -> None:
        start = time.perf_counter()
        LIBRARY.run_step(*arguments)
        self.step_s += time.perf_counter() - start


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("draw", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_a_steps_phases_add_up_to_the_step(small_dir: Path, draw: SamplingParams, threads: int) -> None:
    library = TimedLibrary()
    side = Side(small_dir, KERNELS[0].values[0], block_size=16, dtype=torch.float32, threads=threads, library=library)
    assert side.path
    slots = slots_for(side, [300, 17, 40])
    rows = [Row(slots[0], 0, 300, 1), *(Row(slot, len(slot.token_ids) - 1, len(slot.token_ids), 1) for slot in slots[1:])]
    shares = []
    for _ in range(5):
        side.path.seconds = dict.fromkeys(side.path.seconds, 0.0)
        library.step_s = 0.0
        side.path.compute(rows, [SamplingRow(draw, 0, 0)] * 3, [])
        shares.append(sum(side.path.seconds.values()) / library.step_s)
    assert max(shares) <= 1.0
    assert max(shares) > 0.9, "nothing else ran in the middle of the best of them"
    ran = {name for name, seconds in side.path.seconds.items() if seconds}
    assert ran == set(side.path.seconds) - {"shared"} - ({"sample"} if draw is RANDOM else set()) - (
        {"decodes"} if threads > 1 else set()
    )
    side.path.close()


@pytest.mark.slow
def test_the_demo_model_agrees_with_torch_token_by_token(demo_model: Path) -> None:
    for kernel in [kernel.values[0] for kernel in KERNELS if kernel.values[0][0]]:
        check_demo(demo_model, kernel)


def check_demo(demo_model: Path, kernel: Kernel) -> None:
    """float32: equal logits. bfloat16: equal argmax, or a gap of torch's in float32 that the difference explains."""
    side = Side(demo_model, kernel, block_size=16, dtype=kernel[1])
    reference = Side(demo_model, None, block_size=16, dtype=torch.float32)
    rng = random.Random(1)
    prompts = [rng.choices(range(17, 49000), k=60) for _ in range(4)]
    slots = [Slot(NewRow(SequenceId(i), prompt, 60, GREEDY, [5 * i + j for j in range(5)])) for i, prompt in enumerate(prompts)]
    for end in (48, *range(49, 61)):
        start = 0 if end == 48 else end - 1
        rows = [Row(slot, start, end, 1) for slot in slots]
        ours, theirs = side.logits(rows), reference.logits(rows)
        difference = (ours - theirs).abs().max()
        top = theirs.topk(2).values
        sure = top[:, 0] - top[:, 1] > 2 * difference
        assert difference < (1e-4 if kernel[1] is torch.float32 else 0.05) * theirs.abs().max()
        assert (ours.argmax(-1) == theirs.argmax(-1))[sure].all()
        assert kernel[1] is torch.bfloat16 or sure.all()
    assert side.path
    side.path.close()
