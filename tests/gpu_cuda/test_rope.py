"""Rotation and the write into pages in a Triton kernel, against the same in torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from repertory.gpu.cuda.attention.contract import PagedKeysValues
from repertory.gpu.cuda.glue import Glue, TorchGlue
from repertory.gpu.cuda.triton_glue import TritonGlue
from repertory.tests.gpu_cuda.comparing import assert_near, assert_same_bits, cut_out


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


class Step:
    """Tokens of a step on their way to one layer of a pool: strided views of NaN-filled tensors."""

    def __init__(
        self,
        tokens: int,
        shape: tuple[int, int, int],
        block_size: int,
        dtype: torch.dtype,
        pool_dtype: torch.dtype | None = None,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = shape
        width = sum((self.num_heads, 2 * self.num_kv_heads)) * self.head_dim
        projection, self.projection_around = cut_out(tokens, width, dtype)
        self.heads = projection.unflatten(1, (-1, self.head_dim))
        num_blocks = 2 * -(-tokens // block_size) + 2
        around = torch.full((num_blocks, 3, 2, block_size, self.num_kv_heads, self.head_dim), math.nan)
        self.pool = around.to(pool_dtype or dtype)
        self.slots = torch.randperm(num_blocks * block_size)[:tokens]
        self.positions = torch.randint(0, 200, (tokens,))
        angles = torch.rand(200, self.head_dim // 2) * 7
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)

    def cast(self, dtype: torch.dtype) -> Step:
        """A copy of the same numbers in another dtype, with a pool of that dtype unless it is float8."""
        copy = object.__new__(Step)
        copy.__dict__.update(self.__dict__)
        copy.projection_around = self.projection_around.to(dtype, copy=True)
        width = self.heads.shape[1] * self.head_dim
        copy.heads = copy.projection_around[1:-1, 3 : width + 3].unflatten(1, (-1, self.head_dim))
        copy.pool = self.pool.clone() if self.pool.dtype.itemsize == 1 else self.pool.to(dtype, copy=True)
        return copy

    def clone(self) -> Step:
        """A copy that shares nothing that is written."""
        return self.cast(self.heads.dtype)

    @property
    def sections(self) -> Sequence[Tensor]:
        """Query, key and value."""
        return torch.split(self.heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)

    def run(self, glue: Glue, rows: slice = slice(None), *, key_scale: float = 1.0, value_scale: float = 1.0) -> None:
        """Rope and write those rows, in the middle one of three layers."""
        query, key, value = self.sections
        glue.rope_and_write(
            query[rows],
            key[rows],
            value[rows],
            positions=self.positions[rows],
            cos_sin=self.cos_sin,
            slots=self.slots[rows],
            cache=PagedKeysValues(self.pool[:, 1, 0], self.pool[:, 1, 1], key_scale, value_scale),
        )


SMOLLM2, LLAMA_8B = (9, 3, 64), (32, 8, 128)


class TestRope:
    @pytest.mark.parametrize("tokens", [1, 0, 7])
    @pytest.mark.parametrize(
        ("shape", "block_size"),
        [
            (SMOLLM2, 16),
            (LLAMA_8B, 16),
            ((4, 4, 80), 24),
            ((8, 1, 96), 1),
            ((3, 1, 256), 256),
            ((40, 20, 64), 3),
            ((1, 1, 2), 2),
        ],
    )
    def test_in_float32_queries_and_pages_are_the_references(
        self, triton_glue: TritonGlue, torch_glue: TorchGlue, tokens: int, shape: tuple[int, int, int], block_size: int
    ) -> None:
        step = Step(tokens, shape, block_size, torch.float32)
        expected = step.clone()
        step.run(triton_glue)
        expected.run(torch_glue)
        assert_near(step.projection_around, expected.projection_around)
        assert_near(step.pool, expected.pool)
        assert step.pool.isfinite().sum() == 2 * tokens * shape[1] * shape[2]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_in_16_bits_they_are_what_float32_gives_rounded_once(
        self, triton_glue: TritonGlue, torch_glue: TorchGlue, dtype: torch.dtype
    ) -> None:
        step = Step(5, SMOLLM2, 16, dtype)
        expected = step.cast(torch.float32)
        in_16_bits = step.clone()
        step.run(triton_glue)
        expected.run(torch_glue)
        in_16_bits.run(torch_glue)
        for computed in (step.projection_around, step.pool), (in_16_bits.projection_around, in_16_bits.pool):
            assert_near(computed[0].float(), expected.projection_around, 4 * torch.finfo(dtype).eps)
            assert_near(computed[1].float(), expected.pool, 4 * torch.finfo(dtype).eps)
        if dtype is torch.float16:
            assert_same_bits(step.pool, expected.pool.to(dtype))

    def test_keys_and_values_of_the_projection_stay_as_they_were(self, triton_glue: TritonGlue) -> None:
        step = Step(4, SMOLLM2, 16, torch.float32)
        _, key, value = (section.clone() for section in step.sections)
        step.run(triton_glue)
        assert_same_bits(step.sections[1], key)
        assert_same_bits(step.sections[2], value)

    def test_all_tensors_may_have_strides_of_their_own(self, triton_glue: TritonGlue, torch_glue: TorchGlue) -> None:
        # As where query and keys have norms of their own: those are new tensors, the values are still in the projection.
        tokens, num_heads, num_kv_heads, head_dim, block_size = 3, 4, 2, 8, 4
        query = torch.randn(tokens, num_heads, head_dim)
        key = torch.randn(num_kv_heads, tokens, head_dim).transpose(0, 1)
        value = torch.randn(tokens, num_kv_heads + 1, head_dim + 2)[:, 1:, 2:]
        keys = torch.full((5, num_kv_heads, block_size, head_dim), math.nan).transpose(1, 2)
        values = torch.full((block_size, 5, num_kv_heads, head_dim + 4), math.nan)[..., 4:].transpose(0, 1)
        cos_sin = torch.randn(10, head_dim + 6)[:, :head_dim]
        where = {"positions": torch.tensor([9, 0, 4]), "cos_sin": cos_sin, "slots": torch.tensor([19, 0, 6])}
        written = {
            triton_glue: (query.clone(), keys.clone(), values.clone()),
            torch_glue: (query.clone(), keys.clone(), values.clone()),
        }
        for glue, (turned, its_keys, its_values) in written.items():
            glue.rope_and_write(turned, key, value, **where, cache=PagedKeysValues(its_keys, its_values))
        assert written[triton_glue][1].stride() != written[triton_glue][2].stride()
        for tensors in zip(*written.values(), strict=True):
            assert_near(*tensors)

    def test_a_negative_slot_writes_nothing_and_its_query_is_turned(self, glue: Glue, torch_glue: TorchGlue) -> None:
        step = Step(6, SMOLLM2, 16, torch.float32)
        everything = step.clone()
        step.slots = step.slots.clone()
        step.slots[[0, 3]] = torch.tensor([-1, -(1 << 40)])
        step.run(glue)
        everything.run(torch_glue)
        assert_near(step.projection_around, everything.projection_around)
        for slot in everything.slots[[0, 3]].tolist():
            everything.pool[slot // 16, 1, :, slot % 16] = math.nan
        assert_near(step.pool, everything.pool)

    def test_all_slots_may_be_negative(self, glue: Glue) -> None:
        step = Step(3, SMOLLM2, 16, torch.float32)
        step.slots = torch.full((3,), -1)
        step.run(glue)
        assert step.pool.isnan().all()

    def test_nan_of_one_token_stays_with_it(self, glue: Glue) -> None:
        step = Step(3, SMOLLM2, 16, torch.float32)
        step.heads[1] = math.nan
        step.run(glue)
        query = step.sections[0]
        assert query[1].isnan().all() and query[[0, 2]].isfinite().all()
        assert step.pool.isfinite().sum() == 2 * 2 * 3 * 64

    def test_launches_that_write_to_the_same_blocks_leave_each_other_alone(
        self, triton_glue: TritonGlue, torch_glue: TorchGlue
    ) -> None:
        step = Step(7, SMOLLM2, 16, torch.float32)
        step.slots = torch.arange(7) * 2 + 3  # across the border of two blocks
        expected = step.clone()
        for rows in (slice(4, 7), slice(0, 1), slice(1, 4)):
            step.run(triton_glue, rows)
        expected.run(torch_glue)
        assert_near(step.projection_around, expected.projection_around)
        assert_near(step.pool, expected.pool)

    def test_blocks_whose_offset_needs_64_bits_are_reached(self, glue: Glue) -> None:
        stride = 2052
        memory = torch.empty((1 << 20) * stride + stride, dtype=torch.uint8)  # taken page by page, as it is written
        pool = memory.as_strided((1 + (1 << 20), 4, 1, 4), (stride, 8, 4, 1)).view(torch.float8_e4m3fn)
        heads = torch.ones(1, 3, 4)
        glue.rope_and_write(
            *heads.split(1, dim=1),
            positions=torch.tensor([0]),
            cos_sin=torch.tensor([[1.0, 1.0, 0.0, 0.0]]),
            slots=torch.tensor([4 * (1 << 20) + 3]),
            cache=PagedKeysValues(pool, pool[:, :, :, :]),
        )
        assert pool[-1, 3].float().eq(1).all()


class TestFloat8Pool:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("scales", [(1.0, 1.0), (0.037, 2.9)])
    def test_it_holds_what_was_divided_by_the_scales(
        self, triton_glue: TritonGlue, torch_glue: TorchGlue, dtype: torch.dtype, scales: tuple[float, float]
    ) -> None:
        step = Step(7, (4, 2, 80), 16, dtype, torch.float8_e4m3fn)
        expected = step.cast(torch.float32)
        key_scale, value_scale = scales
        step.run(triton_glue, key_scale=key_scale, value_scale=value_scale)
        expected.run(torch_glue, key_scale=key_scale, value_scale=value_scale)
        assert_same_bits(step.pool, expected.pool)
        back = step.pool[:, 1, 1].float().flatten(0, 1)[step.slots] * value_scale
        assert_near(back, step.sections[2].float(), 0.07 * value_scale)

    def test_what_is_too_large_saturates_and_nan_stays_nan(self, glue: Glue) -> None:
        step = Step(1, (1, 1, 8), 1, torch.float32, torch.float8_e4m3fn)
        step.sections[2][0, 0] = torch.tensor([447.0, -449.0, 465.0, 1e30, -math.inf, math.inf, math.nan, -1e38])
        step.run(glue, value_scale=0.5)
        written = step.pool[step.slots[0], 1, 1, 0, 0].float()
        assert_near(written, torch.tensor([448.0, -448.0, 448.0, 448.0, -448.0, 448.0, math.nan, -448.0]), 0.0)

    def test_every_number_is_rounded_to_the_nearest_and_then_to_the_even_one(self, glue: Glue) -> None:
        finite = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        middles = (finite[1:] + finite[:-1]) / 2
        beside = [torch.nextafter(middles, torch.tensor(limit)) for limit in (0.0, 448.0)]
        numbers = torch.cat((finite, middles, *beside, torch.tensor([1e-9, 1e-40]), torch.rand(128) * 448))
        numbers = torch.cat((numbers, -numbers))
        step = Step(1, (1, 1, len(numbers)), 1, torch.float32, torch.float8_e4m3fn)
        step.sections[2][0, 0] = numbers
        step.run(glue)
        assert_same_bits(step.pool[step.slots[0], 1, 1, 0, 0], numbers.to(torch.float8_e4m3fn))
