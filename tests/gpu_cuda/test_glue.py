"""What lies between the matrix products, in Triton kernels, against the same in torch.

Tensors are cut out of larger ones filled with NaN: what reads beside its own rows shows it in the result, and what writes
there leaves a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from repertory.gpu.cuda.glue import Glue, TorchGlue
from repertory.gpu.cuda.kernels import activation, blocks, norms, rope
from repertory.gpu.cuda.triton_glue import TritonGlue

EPS = 1e-5

TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Relative and absolute: two roundings to the dtype. The interpreter cuts float32 to bfloat16 instead of rounding it."""

DTYPES = list(TOLERANCES)


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float | None = None) -> None:
    """Same shape, dtype and, nearly, values; NaN only where the other has it."""
    tolerance = TOLERANCES[theirs.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def cut_out(rows: int, width: int, dtype: torch.dtype, *, scale: float = 1.0, margin: int = 7) -> tuple[Tensor, Tensor]:
    """Random rows inside of a larger tensor of NaN, `margin` columns wider, and that tensor."""
    around = torch.full((rows + 2, width + margin), math.nan, dtype=dtype)
    inside = around[1 : rows + 1, 3 : width + 3]
    inside.copy_(torch.randn(rows, width) * scale)
    return inside, around


def bits(values: Tensor) -> Tensor:
    """Contents as bytes: equal NaNs are equal."""
    return values.contiguous().view(torch.uint8)


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    """Equal in every bit."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert torch.equal(bits(ours), bits(theirs))


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture
def ours() -> TritonGlue:
    return TritonGlue()


@pytest.fixture
def theirs() -> TorchGlue:
    return TorchGlue()


@pytest.fixture(params=[TorchGlue, TritonGlue])
def either(request: pytest.FixtureRequest) -> Glue:
    """For what both promise."""
    glue: Glue = request.param()
    return glue


class TestNorms:
    SHAPES = ((1, 576), (0, 576), (3, 1536), (17, 64), (40, 5), (2, 4096), (1, 1), (130, 8))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("rows", "width"), SHAPES)
    def test_a_norm_is_the_references(
        self, ours: TritonGlue, theirs: TorchGlue, rows: int, width: int, dtype: torch.dtype
    ) -> None:
        x, _ = cut_out(rows, width, dtype, scale=3.0)
        weight = torch.randn(width).to(dtype)
        result = ours.rms_norm(x, weight, EPS)
        assert result.is_contiguous()
        assert_near(result, theirs.rms_norm(x, weight, EPS))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("rows", "width"), SHAPES)
    def test_a_norm_behind_an_addition_is_the_references(
        self, ours: TritonGlue, theirs: TorchGlue, rows: int, width: int, dtype: torch.dtype
    ) -> None:
        x, _ = cut_out(rows, width, dtype)
        residual, around = cut_out(rows, width, dtype, scale=10.0, margin=12)
        weight = torch.randn(width).to(dtype)
        before, expected_around = x.clone(), around.clone()
        expected = theirs.add_rms_norm(x, expected_around[1 : rows + 1, 3 : width + 3], weight, EPS)
        assert_near(ours.add_rms_norm(x, residual, weight, EPS), expected)
        assert_same_bits(x, before)
        if dtype is torch.bfloat16:
            assert_near(around, expected_around)
        else:
            assert_same_bits(around, expected_around)  # its surroundings too

    @pytest.mark.parametrize(("tokens", "heads", "width"), [(5, 3, 128), (1, 9, 64), (0, 2, 64), (3, 1, 80)])
    def test_the_heads_of_a_fused_projection_are_normed_where_they_lie(
        self, ours: TritonGlue, theirs: TorchGlue, tokens: int, heads: int, width: int
    ) -> None:
        fused = torch.full((tokens, heads + 4, width + 3), math.nan)
        x = fused[:, 2 : heads + 2, :width]
        x.copy_(torch.randn(tokens, heads, width))
        weight = torch.randn(width)
        assert_near(ours.rms_norm(x, weight, EPS), theirs.rms_norm(x, weight, EPS))

    def test_it_rounds_where_the_reference_rounds(self, ours: TritonGlue, theirs: TorchGlue) -> None:
        x, weight = torch.randn(8, 1536).half(), torch.randn(1536).half()
        expected = theirs.rms_norm(x, weight, EPS)
        rounded_once = (x.float() * (x.float().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.float()).half()
        assert (rounded_once == expected).float().mean() < 0.9
        assert (ours.rms_norm(x, weight, EPS) == expected).float().mean() > 0.995

    def test_what_is_normed_is_the_sum_as_it_is_kept(self, ours: TritonGlue, theirs: TorchGlue) -> None:
        x, residual, weight = torch.randn(8, 1536).half(), torch.randn(8, 1536).half() * 10, torch.ones(1536).half()
        exact_sum = x.float() + residual.float()
        of_exact_sum = theirs.rms_norm(exact_sum, weight.float(), EPS).half()
        expected = theirs.add_rms_norm(x, residual.clone(), weight, EPS)
        assert (of_exact_sum == expected).float().mean() < 0.9
        assert (ours.add_rms_norm(x, residual, weight, EPS) == expected).float().mean() > 0.995

    def test_a_row_of_nan_is_alone_with_it(self, ours: TritonGlue) -> None:
        x = torch.randn(4, 100)
        x[2, 7] = math.nan
        is_nan = ours.rms_norm(x, torch.ones(100), EPS).isnan()
        assert is_nan[2].all() and not is_nan[[0, 1, 3]].any()

    def test_a_row_of_zeros_stays_one(self, either: Glue) -> None:
        assert not either.rms_norm(torch.zeros(2, 48), torch.ones(48), EPS).any()

    def test_large_float16_rows_do_not_overflow_in_the_square(self, either: Glue) -> None:
        x = torch.full((1, 576), 6e4, dtype=torch.float16)
        assert_near(either.rms_norm(x, torch.ones(576).half(), EPS), torch.ones(1, 576).half())


class TestActivation:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("rows", "width"), [(1, 576), (0, 64), (3, 1536), (5, 1), (2, 2049)])
    def test_it_is_the_references(self, ours: TritonGlue, theirs: TorchGlue, rows: int, width: int, dtype: torch.dtype) -> None:
        gate_up, _ = cut_out(rows, 2 * width, dtype, scale=4.0)
        result = ours.silu_mul(gate_up)
        assert result.is_contiguous()
        assert_near(result, theirs.silu_mul(gate_up))

    def test_a_gate_may_be_of_any_size(self, ours: TritonGlue, theirs: TorchGlue) -> None:
        gates = torch.tensor([0.0, -0.0, -88.0, -104.0, -1e4, -3e38, 88.0, 1e4, 3e38, 1e-30, math.nan])
        gate_up = torch.cat((gates, torch.ones_like(gates)))[None]
        assert_near(ours.silu_mul(gate_up), theirs.silu_mul(gate_up))

    def test_it_rounds_where_the_reference_rounds(self, ours: TritonGlue, theirs: TorchGlue) -> None:
        gate_up = torch.randn(4, 2048).half()
        expected = theirs.silu_mul(gate_up)
        gate, up = gate_up.float().chunk(2, dim=-1)
        assert ((gate * gate.sigmoid() * up).half() == expected).float().mean() < 0.9
        assert (ours.silu_mul(gate_up) == expected).float().mean() > 0.995


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
            keys=self.pool[:, 1, 0],
            values=self.pool[:, 1, 1],
            key_scale=key_scale,
            value_scale=value_scale,
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
        self, ours: TritonGlue, theirs: TorchGlue, tokens: int, shape: tuple[int, int, int], block_size: int
    ) -> None:
        step = Step(tokens, shape, block_size, torch.float32)
        expected = step.clone()
        step.run(ours)
        expected.run(theirs)
        assert_near(step.projection_around, expected.projection_around)
        assert_near(step.pool, expected.pool)
        assert step.pool.isfinite().sum() == 2 * tokens * shape[1] * shape[2]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_in_16_bits_they_are_what_float32_gives_rounded_once(
        self, ours: TritonGlue, theirs: TorchGlue, dtype: torch.dtype
    ) -> None:
        step = Step(5, SMOLLM2, 16, dtype)
        expected = step.cast(torch.float32)
        in_16_bits = step.clone()
        step.run(ours)
        expected.run(theirs)
        in_16_bits.run(theirs)
        for computed in (step.projection_around, step.pool), (in_16_bits.projection_around, in_16_bits.pool):
            assert_near(computed[0].float(), expected.projection_around, 4 * torch.finfo(dtype).eps)
            assert_near(computed[1].float(), expected.pool, 4 * torch.finfo(dtype).eps)
        if dtype is torch.float16:
            assert_same_bits(step.pool, expected.pool.to(dtype))

    def test_keys_and_values_of_the_projection_stay_as_they_were(self, ours: TritonGlue) -> None:
        step = Step(4, SMOLLM2, 16, torch.float32)
        _, key, value = (section.clone() for section in step.sections)
        step.run(ours)
        assert_same_bits(step.sections[1], key)
        assert_same_bits(step.sections[2], value)

    def test_all_tensors_may_have_strides_of_their_own(self, ours: TritonGlue, theirs: TorchGlue) -> None:
        # As where query and keys have norms of their own: those are new tensors, the values are still in the projection.
        tokens, num_heads, num_kv_heads, head_dim, block_size = 3, 4, 2, 8, 4
        query = torch.randn(tokens, num_heads, head_dim)
        key = torch.randn(num_kv_heads, tokens, head_dim).transpose(0, 1)
        value = torch.randn(tokens, num_kv_heads + 1, head_dim + 2)[:, 1:, 2:]
        keys = torch.full((5, num_kv_heads, block_size, head_dim), math.nan).transpose(1, 2)
        values = torch.full((block_size, 5, num_kv_heads, head_dim + 4), math.nan)[..., 4:].transpose(0, 1)
        cos_sin = torch.randn(10, head_dim + 6)[:, :head_dim]
        where = {"positions": torch.tensor([9, 0, 4]), "cos_sin": cos_sin, "slots": torch.tensor([19, 0, 6])}
        written = {ours: (query.clone(), keys.clone(), values.clone()), theirs: (query.clone(), keys.clone(), values.clone())}
        for glue, (turned, its_keys, its_values) in written.items():
            glue.rope_and_write(turned, key, value, **where, keys=its_keys, values=its_values)
        assert written[ours][1].stride() != written[ours][2].stride()
        for tensors in zip(*written.values(), strict=True):
            assert_near(*tensors)

    def test_a_negative_slot_writes_nothing_and_its_query_is_turned(self, either: Glue, theirs: TorchGlue) -> None:
        step = Step(6, SMOLLM2, 16, torch.float32)
        everything = step.clone()
        step.slots = step.slots.clone()
        step.slots[[0, 3]] = torch.tensor([-1, -(1 << 40)])
        step.run(either)
        everything.run(theirs)
        assert_near(step.projection_around, everything.projection_around)
        for slot in everything.slots[[0, 3]].tolist():
            everything.pool[slot // 16, 1, :, slot % 16] = math.nan
        assert_near(step.pool, everything.pool)

    def test_all_slots_may_be_negative(self, either: Glue) -> None:
        step = Step(3, SMOLLM2, 16, torch.float32)
        step.slots = torch.full((3,), -1)
        step.run(either)
        assert step.pool.isnan().all()

    def test_nan_of_one_token_stays_with_it(self, either: Glue) -> None:
        step = Step(3, SMOLLM2, 16, torch.float32)
        step.heads[1] = math.nan
        step.run(either)
        query = step.sections[0]
        assert query[1].isnan().all() and query[[0, 2]].isfinite().all()
        assert step.pool.isfinite().sum() == 2 * 2 * 3 * 64

    def test_launches_that_write_to_the_same_blocks_leave_each_other_alone(self, ours: TritonGlue, theirs: TorchGlue) -> None:
        step = Step(7, SMOLLM2, 16, torch.float32)
        step.slots = torch.arange(7) * 2 + 3  # across the border of two blocks
        expected = step.clone()
        for rows in (slice(4, 7), slice(0, 1), slice(1, 4)):
            step.run(ours, rows)
        expected.run(theirs)
        assert_near(step.projection_around, expected.projection_around)
        assert_near(step.pool, expected.pool)

    def test_blocks_whose_offset_needs_64_bits_are_reached(self, either: Glue) -> None:
        stride = 2052
        memory = torch.empty((1 << 20) * stride + stride, dtype=torch.uint8)  # taken page by page, as it is written
        pool = memory.as_strided((1 + (1 << 20), 4, 1, 4), (stride, 8, 4, 1)).view(torch.float8_e4m3fn)
        heads = torch.ones(1, 3, 4)
        either.rope_and_write(
            *heads.split(1, dim=1),
            positions=torch.tensor([0]),
            cos_sin=torch.tensor([[1.0, 1.0, 0.0, 0.0]]),
            slots=torch.tensor([4 * (1 << 20) + 3]),
            keys=pool,
            values=pool[:, :, :, :],
        )
        assert pool[-1, 3].float().eq(1).all()


class TestFloat8Pool:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("scales", [(1.0, 1.0), (0.037, 2.9)])
    def test_it_holds_what_was_divided_by_the_scales(
        self, ours: TritonGlue, theirs: TorchGlue, dtype: torch.dtype, scales: tuple[float, float]
    ) -> None:
        step = Step(7, (4, 2, 80), 16, dtype, torch.float8_e4m3fn)
        expected = step.cast(torch.float32)
        key_scale, value_scale = scales
        step.run(ours, key_scale=key_scale, value_scale=value_scale)
        expected.run(theirs, key_scale=key_scale, value_scale=value_scale)
        assert_same_bits(step.pool, expected.pool)
        back = step.pool[:, 1, 1].float().flatten(0, 1)[step.slots] * value_scale
        assert_near(back, step.sections[2].float(), 0.07 * value_scale)

    def test_what_is_too_large_saturates_and_nan_stays_nan(self, either: Glue) -> None:
        step = Step(1, (1, 1, 8), 1, torch.float32, torch.float8_e4m3fn)
        step.sections[2][0, 0] = torch.tensor([447.0, -449.0, 465.0, 1e30, -math.inf, math.inf, math.nan, -1e38])
        step.run(either, value_scale=0.5)
        written = step.pool[step.slots[0], 1, 1, 0, 0].float()
        assert_near(written, torch.tensor([448.0, -448.0, 448.0, 448.0, -448.0, 448.0, math.nan, -448.0]), 0.0)

    def test_every_number_is_rounded_to_the_nearest_and_then_to_the_even_one(self, either: Glue) -> None:
        finite = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        middles = (finite[1:] + finite[:-1]) / 2
        beside = [torch.nextafter(middles, torch.tensor(limit)) for limit in (0.0, 448.0)]
        numbers = torch.cat((finite, middles, *beside, torch.tensor([1e-9, 1e-40]), torch.rand(128) * 448))
        numbers = torch.cat((numbers, -numbers))
        step = Step(1, (1, 1, len(numbers)), 1, torch.float32, torch.float8_e4m3fn)
        step.sections[2][0, 0] = numbers
        step.run(either)
        assert_same_bits(step.pool[step.slots[0], 1, 1, 0, 0], numbers.to(torch.float8_e4m3fn))


POOL_SHAPES = [(5, 2, 2, 16, 3, 64), (6, 1, 2, 1, 1, 2), (4, 3, 2, 24, 1, 80), (3, 1, 2, 4, 3, 3), (4, 2, 2, 5, 1, 1)]
"""Slots of 8 bytes and more, of 4, 2 and 1 byte in one dtype or another."""

POOL_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def random_pool(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits, NaNs with payloads among them."""
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", POOL_DTYPES)
@pytest.mark.parametrize("shape", POOL_SHAPES)
class TestBlocks:
    def test_leading_slots_are_copied_and_all_others_left_alone(
        self, either: Glue, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        pool = random_pool(shape, dtype)
        expected = pool.clone()
        block_size = shape[3]
        copies = [(0, 2, block_size), (0, 1, (block_size + 1) // 2)][: len(pool) - 2]
        for source, target, count in copies:
            bits(expected)[target, :, :, :count] = bits(pool)[source, :, :, :count]
        either.copy_slots(pool, *(torch.tensor(column) for column in zip(*copies, strict=True)))
        assert_same_bits(pool, expected)

    def test_a_copy_of_no_slots_and_no_copy_at_all_change_nothing(
        self, either: Glue, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        pool = random_pool(shape, dtype)
        before = pool.clone()
        either.copy_slots(pool, torch.tensor([0]), torch.tensor([1]), torch.tensor([0]))
        nothing = torch.empty(0, dtype=torch.int64)
        either.copy_slots(pool, nothing, nothing, nothing)
        assert_same_bits(pool, before)

    def test_gathered_blocks_are_the_pools(self, either: Glue, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        pool = random_pool(shape, dtype)
        before = pool.clone()
        wanted = torch.tensor([len(pool) - 1, 0, 0])
        around = random_pool((5, *shape[1:]), dtype)
        beside = around[[0, 4]]
        either.gather_blocks(pool, wanted, around[1:4])
        assert_same_bits(around[1:4], pool[wanted])
        assert_same_bits(around[[0, 4]], beside)
        assert_same_bits(pool, before)

    def test_scattering_what_was_gathered_restores_it(self, either: Glue, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        pool = random_pool(shape, dtype)
        before = pool.clone()
        chosen = torch.tensor([len(pool) - 1, 0])
        kept = torch.empty((2, *shape[1:]), dtype=dtype)
        either.gather_blocks(pool, chosen, kept)
        bits(pool)[chosen] = 0
        pool[chosen] = torch.zeros_like(kept) if dtype.itemsize > 1 else kept.view(torch.uint8).mul(0).view(dtype)
        changed = pool.clone()
        either.scatter_blocks(pool, chosen, kept)
        assert_same_bits(pool, before)
        either.scatter_blocks(changed, chosen[:0], kept[:0])
        assert not torch.equal(bits(changed), bits(before))


class TestBlocksInMemory:
    def test_blocks_may_lie_apart(self, ours: TritonGlue) -> None:
        around = random_pool((6, 2, 2, 4, 1, 8), torch.float16)
        pool, before = around[::2], around.clone()
        kept = random_pool((4, 2, 2, 4, 1, 8), torch.float16)[::2]
        ours.gather_blocks(pool, torch.tensor([2, 1]), kept)
        assert_same_bits(kept, before[[4, 2]])
        pool[1:] = 0
        ours.scatter_blocks(pool, torch.tensor([2, 1]), kept)
        assert_same_bits(around, before)
        ours.copy_slots(pool, torch.tensor([0]), torch.tensor([2]), torch.tensor([3]))
        assert_same_bits(around[4, :, :, :3], before[0, :, :, :3])
        assert_same_bits(around[:4], before[:4])
        assert_same_bits(around[5], before[5])

    @pytest.mark.parametrize("skipped", [1, 2, 4])
    def test_a_pool_need_not_be_aligned_to_8_bytes(self, ours: TritonGlue, skipped: int) -> None:
        memory = random_pool((3 * 64 + skipped,), torch.float8_e4m3fn)
        pool = memory[skipped:].view(3, 1, 2, 4, 1, 8)
        kept = torch.empty(2, *pool.shape[1:], dtype=pool.dtype)
        ours.gather_blocks(pool, torch.tensor([2, 0]), kept)
        assert_same_bits(kept, pool[[2, 0]])

    def test_a_block_that_is_not_contiguous_is_refused(self, ours: TritonGlue) -> None:
        pool = torch.zeros(3, 2, 2, 4, 2, 8).transpose(3, 4)
        with pytest.raises(RuntimeError, match="view"):
            ours.gather_blocks(pool, torch.tensor([0]), torch.empty(1, *pool.shape[1:]))

    def test_blocks_whose_offset_needs_64_bits_are_reached(self, ours: TritonGlue) -> None:
        stride, last = 2049, 1 << 20
        memory = torch.empty(last * stride + stride, dtype=torch.uint8)  # taken page by page, as it is written
        pool = memory.as_strided((last + 1, 1, 2, 4, 1, 3), (stride, 24, 12, 3, 3, 1))
        pool[0], pool[last] = 7, 9
        kept = torch.zeros(1, *pool.shape[1:], dtype=torch.uint8)
        ours.gather_blocks(pool, torch.tensor([last]), kept)
        assert kept.eq(9).all()
        ours.copy_slots(pool, torch.tensor([0]), torch.tensor([last]), torch.tensor([2]))
        assert pool[last, 0, :, :2].eq(7).all() and pool[last, 0, :, 2:].eq(9).all()
        ours.scatter_blocks(pool, torch.tensor([last]), kept + 1)
        assert pool[last].eq(10).all()
        ours.copy_slots(pool, torch.tensor([last]), torch.tensor([1]), torch.tensor([4]))
        assert pool[1].eq(10).all()


class Launches:
    """Stands for a kernel: counts its launches and runs nothing."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Launches:
        assert all(size > 0 for size in grid)
        return self

    def __call__(self, *arguments: object, **constants: object) -> None:
        self.count += 1


def test_each_method_is_one_launch_and_reads_nothing_back(ours: TritonGlue, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors without contents: reading one of them on the host raises.
    def empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    launches = Launches()
    for module in (activation, blocks, norms, rope):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, launches)
    ids, pool, hidden = empty(3, dtype=torch.int64), empty(6, 2, 2, 16, 3, 64), empty(3, 576)
    calls = (
        lambda: ours.rms_norm(hidden, empty(576), EPS),
        lambda: ours.rms_norm(empty(3, 9, 64), empty(64), EPS),
        lambda: ours.add_rms_norm(hidden, hidden, empty(576), EPS),
        lambda: ours.silu_mul(empty(3, 3072)),
        lambda: ours.copy_slots(pool, ids, ids, ids),
        lambda: ours.gather_blocks(pool, ids, pool[:3]),
        lambda: ours.scatter_blocks(pool, ids, pool[:3]),
        lambda: ours.rope_and_write(
            *empty(3, 15, 64).split([9, 3, 3], dim=1),
            positions=ids,
            cos_sin=empty(8, 64, dtype=torch.float32),
            slots=ids,
            keys=pool[:, 0, 0],
            values=pool[:, 0, 1],
        ),
    )
    for number, call in enumerate(calls, 1):
        call()
        assert launches.count == number
