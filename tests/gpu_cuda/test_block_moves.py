"""Moves of blocks within a pool, and between it and a buffer: in Triton kernels, and in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from repertory.gpu.cuda.glue import Glue
from repertory.gpu.cuda.triton_glue import TritonGlue
from repertory.tests.gpu_cuda.comparing import assert_same_bits, bits

POOL_SHAPES = [(5, 2, 2, 16, 3, 64), (6, 1, 2, 1, 1, 2), (4, 3, 2, 24, 1, 80), (3, 1, 2, 4, 3, 3), (4, 2, 2, 5, 1, 1)]
"""Slots of 8 bytes and more, of 4, 2 and 1 byte in one dtype or another."""

POOL_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def random_pool(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits, NaNs with payloads among them."""
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", POOL_DTYPES)
@pytest.mark.parametrize("shape", POOL_SHAPES)
class TestBlocks:
    def test_leading_slots_are_copied_and_all_others_left_alone(
        self, glue: Glue, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        pool = random_pool(shape, dtype)
        expected = pool.clone()
        block_size = shape[3]
        copies = [(0, 2, block_size), (0, 1, (block_size + 1) // 2)][: len(pool) - 2]
        for source, target, count in copies:
            bits(expected)[target, :, :, :count] = bits(pool)[source, :, :, :count]
        glue.copy_slots(pool, *(torch.tensor(column) for column in zip(*copies, strict=True)))
        assert_same_bits(pool, expected)

    def test_a_copy_of_no_slots_and_no_copy_at_all_change_nothing(
        self, glue: Glue, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        pool = random_pool(shape, dtype)
        before = pool.clone()
        glue.copy_slots(pool, torch.tensor([0]), torch.tensor([1]), torch.tensor([0]))
        nothing = torch.empty(0, dtype=torch.int64)
        glue.copy_slots(pool, nothing, nothing, nothing)
        assert_same_bits(pool, before)

    def test_gathered_blocks_are_the_pools(self, glue: Glue, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        pool = random_pool(shape, dtype)
        before = pool.clone()
        wanted = torch.tensor([len(pool) - 1, 0, 0])
        around = random_pool((5, *shape[1:]), dtype)
        beside = around[[0, 4]]
        glue.gather_blocks(pool, wanted, around[1:4])
        assert_same_bits(around[1:4], pool[wanted])
        assert_same_bits(around[[0, 4]], beside)
        assert_same_bits(pool, before)

    def test_scattering_what_was_gathered_restores_it(self, glue: Glue, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        pool = random_pool(shape, dtype)
        before = pool.clone()
        chosen = torch.tensor([len(pool) - 1, 0])
        kept = torch.empty((2, *shape[1:]), dtype=dtype)
        glue.gather_blocks(pool, chosen, kept)
        bits(pool)[chosen] = 0
        cleared = pool.clone()
        glue.scatter_blocks(pool, chosen[:0], kept[:0])
        assert_same_bits(pool, cleared)
        glue.scatter_blocks(pool, chosen, kept)
        assert_same_bits(pool, before)


class TestBlocksInMemory:
    def test_blocks_may_lie_apart(self, triton_glue: TritonGlue) -> None:
        around = random_pool((6, 2, 2, 4, 1, 8), torch.float16)
        pool, before = around[::2], around.clone()
        kept = random_pool((4, 2, 2, 4, 1, 8), torch.float16)[::2]
        triton_glue.gather_blocks(pool, torch.tensor([2, 1]), kept)
        assert_same_bits(kept, before[[4, 2]])
        pool[1:] = 0
        triton_glue.scatter_blocks(pool, torch.tensor([2, 1]), kept)
        assert_same_bits(around, before)
        triton_glue.copy_slots(pool, torch.tensor([0]), torch.tensor([2]), torch.tensor([3]))
        assert_same_bits(around[4, :, :, :3], before[0, :, :, :3])
        assert_same_bits(around[:4], before[:4])
        assert_same_bits(around[5], before[5])

    @pytest.mark.parametrize("skipped", [1, 2, 4])
    def test_a_pool_need_not_be_aligned_to_8_bytes(self, triton_glue: TritonGlue, skipped: int) -> None:
        memory = random_pool((3 * 64 + skipped,), torch.float8_e4m3fn)
        pool = memory[skipped:].view(3, 1, 2, 4, 1, 8)
        kept = torch.empty(2, *pool.shape[1:], dtype=pool.dtype)
        triton_glue.gather_blocks(pool, torch.tensor([2, 0]), kept)
        assert_same_bits(kept, pool[[2, 0]])

    def test_a_block_that_is_not_contiguous_is_refused(self, triton_glue: TritonGlue) -> None:
        pool = torch.zeros(3, 2, 2, 4, 2, 8).transpose(3, 4)
        with pytest.raises(RuntimeError, match="view"):
            triton_glue.gather_blocks(pool, torch.tensor([0]), torch.empty(1, *pool.shape[1:]))

    def test_blocks_whose_offset_needs_64_bits_are_reached(self, triton_glue: TritonGlue) -> None:
        stride, last = 2049, 1 << 20
        memory = torch.empty(last * stride + stride, dtype=torch.uint8)  # taken page by page, as it is written
        pool = memory.as_strided((last + 1, 1, 2, 4, 1, 3), (stride, 24, 12, 3, 3, 1))
        pool[0], pool[last] = 7, 9
        kept = torch.zeros(1, *pool.shape[1:], dtype=torch.uint8)
        triton_glue.gather_blocks(pool, torch.tensor([last]), kept)
        assert kept.eq(9).all()
        triton_glue.copy_slots(pool, torch.tensor([0]), torch.tensor([last]), torch.tensor([2]))
        assert pool[last, 0, :, :2].eq(7).all() and pool[last, 0, :, 2:].eq(9).all()
        triton_glue.scatter_blocks(pool, torch.tensor([last]), kept + 1)
        assert pool[last].eq(10).all()
        triton_glue.copy_slots(pool, torch.tensor([last]), torch.tensor([1]), torch.tensor([4]))
        assert pool[1].eq(10).all()
