"""Norms and the activation in Triton kernels, against the same in torch; and what all glue promises of its launches.

Rows are cut out of larger tensors filled with NaN: what reads beside its own shows it in the result, and what writes there
leaves a number.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from repertory.gpu.cuda.attention.contract import PagedKeysValues
from repertory.gpu.cuda.glue import Glue, TorchGlue
from repertory.gpu.cuda.kernels import activation, blocks, norms, rope
from repertory.gpu.cuda.triton_glue import TritonGlue
from repertory.tests.gpu_cuda.comparing import DTYPES, assert_near, assert_same_bits, cut_out

EPS = 1e-5


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


class TestNorms:
    SHAPES = ((1, 576), (0, 576), (3, 1536), (17, 64), (40, 5), (2, 4096), (1, 1), (130, 8))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("rows", "width"), SHAPES)
    def test_a_norm_is_the_references(
        self, triton_glue: TritonGlue, torch_glue: TorchGlue, rows: int, width: int, dtype: torch.dtype
    ) -> None:
        x, _ = cut_out(rows, width, dtype, scale=3.0)
        weight = torch.randn(width).to(dtype)
        result = triton_glue.rms_norm(x, weight, EPS)
        assert result.is_contiguous()
        assert_near(result, torch_glue.rms_norm(x, weight, EPS))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("rows", "width"), SHAPES)
    def test_a_norm_behind_an_addition_is_the_references(
        self, triton_glue: TritonGlue, torch_glue: TorchGlue, rows: int, width: int, dtype: torch.dtype
    ) -> None:
        x, _ = cut_out(rows, width, dtype)
        residual, around = cut_out(rows, width, dtype, scale=10.0, margin=12)
        weight = torch.randn(width).to(dtype)
        before, expected_around = x.clone(), around.clone()
        expected = torch_glue.add_rms_norm(x, expected_around[1 : rows + 1, 3 : width + 3], weight, EPS)
        assert_near(triton_glue.add_rms_norm(x, residual, weight, EPS), expected)
        assert_same_bits(x, before)
        if dtype is torch.bfloat16:
            assert_near(around, expected_around)
        else:
            assert_same_bits(around, expected_around)  # its surroundings too

    @pytest.mark.parametrize(("tokens", "heads", "width"), [(5, 3, 128), (1, 9, 64), (0, 2, 64), (3, 1, 80)])
    def test_the_heads_of_a_fused_projection_are_normed_where_they_lie(
        self, triton_glue: TritonGlue, torch_glue: TorchGlue, tokens: int, heads: int, width: int
    ) -> None:
        fused = torch.full((tokens, heads + 4, width + 3), math.nan)
        x = fused[:, 2 : heads + 2, :width]
        x.copy_(torch.randn(tokens, heads, width))
        weight = torch.randn(width)
        assert_near(triton_glue.rms_norm(x, weight, EPS), torch_glue.rms_norm(x, weight, EPS))

    def test_it_rounds_where_the_reference_rounds(self, triton_glue: TritonGlue, torch_glue: TorchGlue) -> None:
        x, weight = torch.randn(8, 1536).half(), torch.randn(1536).half()
        expected = torch_glue.rms_norm(x, weight, EPS)
        rounded_once = (x.float() * (x.float().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.float()).half()
        assert (rounded_once == expected).float().mean() < 0.9
        assert (triton_glue.rms_norm(x, weight, EPS) == expected).float().mean() > 0.995

    def test_what_is_normed_is_the_sum_as_it_is_kept(self, triton_glue: TritonGlue, torch_glue: TorchGlue) -> None:
        x, residual, weight = torch.randn(8, 1536).half(), torch.randn(8, 1536).half() * 10, torch.ones(1536).half()
        exact_sum = x.float() + residual.float()
        of_exact_sum = torch_glue.rms_norm(exact_sum, weight.float(), EPS).half()
        expected = torch_glue.add_rms_norm(x, residual.clone(), weight, EPS)
        assert (of_exact_sum == expected).float().mean() < 0.9
        assert (triton_glue.add_rms_norm(x, residual, weight, EPS) == expected).float().mean() > 0.995

    def test_a_row_of_nan_is_alone_with_it(self, triton_glue: TritonGlue) -> None:
        x = torch.randn(4, 100)
        x[2, 7] = math.nan
        is_nan = triton_glue.rms_norm(x, torch.ones(100), EPS).isnan()
        assert is_nan[2].all() and not is_nan[[0, 1, 3]].any()

    def test_a_row_of_zeros_stays_one(self, glue: Glue) -> None:
        assert not glue.rms_norm(torch.zeros(2, 48), torch.ones(48), EPS).any()

    def test_large_float16_rows_do_not_overflow_in_the_square(self, glue: Glue) -> None:
        x = torch.full((1, 576), 6e4, dtype=torch.float16)
        assert_near(glue.rms_norm(x, torch.ones(576).half(), EPS), torch.ones(1, 576).half())


class TestActivation:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("rows", "width"), [(1, 576), (0, 64), (3, 1536), (5, 1), (2, 2049)])
    def test_it_is_the_references(
        self, triton_glue: TritonGlue, torch_glue: TorchGlue, rows: int, width: int, dtype: torch.dtype
    ) -> None:
        gate_up, _ = cut_out(rows, 2 * width, dtype, scale=4.0)
        result = triton_glue.silu_mul(gate_up)
        assert result.is_contiguous()
        assert_near(result, torch_glue.silu_mul(gate_up))

    def test_a_gate_may_be_of_any_size(self, triton_glue: TritonGlue, torch_glue: TorchGlue) -> None:
        gates = torch.tensor([0.0, -0.0, -88.0, -104.0, -1e4, -3e38, 88.0, 1e4, 3e38, 1e-30, math.nan])
        gate_up = torch.cat((gates, torch.ones_like(gates)))[None]
        assert_near(triton_glue.silu_mul(gate_up), torch_glue.silu_mul(gate_up))

    def test_it_rounds_where_the_reference_rounds(self, triton_glue: TritonGlue, torch_glue: TorchGlue) -> None:
        gate_up = torch.randn(4, 2048).half()
        expected = torch_glue.silu_mul(gate_up)
        gate, up = gate_up.float().chunk(2, dim=-1)
        assert ((gate * gate.sigmoid() * up).half() == expected).float().mean() < 0.9
        assert (triton_glue.silu_mul(gate_up) == expected).float().mean() > 0.995


class Launches:
    """Stands for a kernel: counts its launches and runs nothing."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Launches:
        assert all(size > 0 for size in grid)
        return self

    def __call__(self, *arguments: object, **constants: object) -> None:
        self.count += 1


def test_each_method_is_one_launch_and_reads_nothing_back(triton_glue: TritonGlue, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors without contents: reading one of them on the host raises.
    def empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    launches = Launches()
    for module in (activation, blocks, norms, rope):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, launches)
    ids, pool, hidden = empty(3, dtype=torch.int64), empty(6, 2, 2, 16, 3, 64), empty(3, 576)
    calls = (
        lambda: triton_glue.rms_norm(hidden, empty(576), EPS),
        lambda: triton_glue.rms_norm(empty(3, 9, 64), empty(64), EPS),
        lambda: triton_glue.add_rms_norm(hidden, hidden, empty(576), EPS),
        lambda: triton_glue.silu_mul(empty(3, 3072)),
        lambda: triton_glue.copy_slots(pool, ids, ids, ids),
        lambda: triton_glue.gather_blocks(pool, ids, pool[:3]),
        lambda: triton_glue.scatter_blocks(pool, ids, pool[:3]),
        lambda: triton_glue.rope_and_write(
            *empty(3, 15, 64).split([9, 3, 3], dim=1),
            positions=ids,
            cos_sin=empty(8, 64, dtype=torch.float32),
            slots=ids,
            cache=PagedKeysValues(pool[:, 0, 0], pool[:, 0, 1]),
        ),
    )
    for number, call in enumerate(calls, 1):
        call()
        assert launches.count == number
