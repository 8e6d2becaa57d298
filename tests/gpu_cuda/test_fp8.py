"""Matrices in float8: how they round, what they bear, and what they keep alive."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from repertory.gpu.cuda.fp8 import (
    FP8,
    LARGEST,
    MULTIPLE,
    SMALLEST_SCALE,
    Fp8Maker,
    Fp8Matrix,
    QuantizeRows,
    dequantized_product,
    fp8_maker,
    padded,
    quantize_rows,
    quantized,
    quantized_weight,
    scaled_product,
    why_no_fp8,
)
from repertory.gpu.cuda.kernels.quantize import quantize_rows as triton_quantize_rows
from repertory.gpu.cuda.matrices import Dense, LayerMatrices, layer_matrices
from repertory.gpu.models.config import load_model_config
from repertory.gpu.models.weights import LayerWeights, load_converted, load_weights
from repertory.tests.tiny_model import make_tiny_model

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BOTH_WAYS = pytest.mark.parametrize("quantize", [quantize_rows, triton_quantize_rows], ids=["torch", "triton"])
CODES = torch.arange(256, dtype=torch.uint8).view(FP8)
"""Every float8 there is; two are NaN."""


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(elements: Tensor) -> Tensor:
    return elements.view(torch.uint8)


def fp8_matrix(weight: Tensor, bias: Tensor | None = None, *, quantize: QuantizeRows = quantize_rows) -> Fp8Matrix:
    return Fp8Matrix(weight, bias, quantize=quantize, multiply=dequantized_product)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# ---- rounding -----------------------------------------------------------------------------------


def with_midpoints() -> Tensor:
    """Every finite float8, the points half-way between two, and the floats next to those. The largest is 448."""
    codes = CODES.float()
    finite = codes[codes.isfinite()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    around = [torch.nextafter(middle, torch.full_like(middle, side)) for side in (1e9, -1e9)]
    return torch.cat((finite, middle, *around))


@BOTH_WAYS
def test_elements_round_to_the_nearest_float8_and_ties_to_the_even_one(quantize: QuantizeRows) -> None:
    values = with_midpoints()
    elements, scales = quantize(values[None])
    assert scales.tolist() == [[1.0]]
    finite = CODES[CODES.float().isfinite()]
    distance = (values.double()[:, None] - finite.double()[None]).abs()
    is_odd = bits(finite) & 1
    nearest = torch.argmin(distance + is_odd * 1e-12, dim=1)
    assert torch.equal(elements[0].float(), finite.float()[nearest])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (17, 48), (3, 1), (5, 1000), (2, 9000)])
def test_the_kernel_quantises_like_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows = (drawn(*shape) * torch.logspace(-3, 3, shape[0])[:, None]).to(dtype)
    for x in (rows, torch.cat((rows, rows), dim=1)[:, : shape[1]], rows.repeat_interleave(2, dim=0)[::2]):
        elements, scales = triton_quantize_rows(x)
        expected, expected_scales = quantize_rows(x)
        assert elements.shape == expected.shape == (padded(shape[0]), shape[1])
        assert torch.equal(bits(elements[: shape[0]]), bits(expected[: shape[0]]))
        assert torch.equal(scales, expected_scales)


@BOTH_WAYS
def test_no_rows_are_quantised_to_no_rows(quantize: QuantizeRows) -> None:
    elements, scales = quantize(torch.empty(0, 32))
    assert elements.shape == (0, 32) and scales.shape == (0, 1)


@pytest.mark.parametrize(("rows", "expected"), [(0, 0), (1, 16), (16, 16), (17, 32), (512, 512)])
def test_rows_are_rounded_up_to_what_cublas_takes(rows: int, expected: int) -> None:
    assert padded(rows) == expected


@BOTH_WAYS
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of infinity / infinity in the interpreter
def test_a_row_is_quantised_to_the_same_bits_in_any_company(quantize: QuantizeRows) -> None:
    x = drawn(9, 80)
    alone = [quantize(x[i : i + 1]) for i in range(9)]
    x[2, 5], x[4, 0], x[6] = 1e30, float("nan"), float("inf")
    elements, scales = quantize(x)
    for i in (0, 1, 3, 5, 7, 8):
        assert torch.equal(bits(elements[i]), bits(alone[i][0][0])) and torch.equal(scales[i], alone[i][1][0])


@BOTH_WAYS
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_survives_with_half_a_step_of_error(quantize: QuantizeRows, dtype: torch.dtype) -> None:
    x = (drawn(6, 400, seed=2) * torch.logspace(-12, 1, 400)).to(dtype)
    elements, scales = quantize(x)
    error = (elements[:6].double() * scales - x.double()).abs()
    # 3 bits of mantissa down to 2**-6; steps of 2**-9 below.
    allowed = torch.maximum(x.double().abs() * 2**-4, scales.double() * 2**-10) * (1 + 1e-6)
    assert bool((error <= allowed).all())
    assert bool((error > allowed / 2).any())


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=24))
def test_any_row_of_numbers_is_restored_within_half_a_step(row: list[float]) -> None:
    x = torch.tensor([row])
    elements, scales = quantize_rows(x)
    restored = elements[:1].double() * scales.double()
    allowed = torch.maximum(x.double().abs() * 2**-4, scales.double() * 2**-10)
    assert bool(((restored - x.double()).abs() <= allowed * (1 + 1e-6)).all())
    assert bool((restored * x >= 0).all()), "no sign changes"


@BOTH_WAYS
def test_zeros_stay_zeros(quantize: QuantizeRows) -> None:
    elements, scales = quantize(torch.zeros(3, 32))
    assert not elements[:3].float().any()
    assert bool((scales > 0).all()) and bool(scales.isfinite().all())
    assert not fp8_matrix(torch.zeros(16, 32), quantize=quantize)(torch.ones(2, 32)).any()
    assert not fp8_matrix(torch.ones(16, 32), quantize=quantize)(torch.zeros(2, 32)).any()


@BOTH_WAYS
def test_rows_of_numbers_too_small_to_be_normal_are_not_nan(quantize: QuantizeRows) -> None:
    tiny = torch.tensor([[1e-45, 0.0, -1e-40] + [1e-39] * 13, [1e-38] * 16])
    elements, scales = quantize(tiny)
    assert bool((scales == SMALLEST_SCALE).all())
    restored = elements[:2].double() * scales
    assert bool((restored - tiny.double()).abs().max() <= SMALLEST_SCALE * 2**-4)


@BOTH_WAYS
@pytest.mark.parametrize("outlier", [1e4, -3e38])
def test_an_outlier_is_kept_and_flattens_only_its_row(quantize: QuantizeRows, outlier: float) -> None:
    x = drawn(2, 64)
    x[0, 7] = outlier
    elements, scales = quantize(x)
    restored = elements[:2].double() * scales
    assert restored[0, 7] == pytest.approx(outlier, rel=1e-6)
    assert bool(restored.isfinite().all())
    assert relative_error(restored[1], x[1]) < 0.04


def test_what_is_larger_than_its_scale_allows_saturates_and_nan_stays_nan() -> None:
    values = torch.tensor([447.0, 449.0, 464.1, 1e6, -1e30, float("inf"), float("-inf"), float("nan")])
    found = quantized(values, torch.tensor(1.0)).float()
    assert found[:7].tolist() == [448.0, 448.0, 448.0, 448.0, -448.0, 448.0, -448.0]
    assert bool(found[7].isnan())
    assert LARGEST == 448.0


# ---- products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "width", "out"), [(16, 16, 16), (16, 64, 48), (32, 160, 16)])
def test_torchs_product_is_the_reference_product(rows: int, width: int, out: int, dtype: torch.dtype) -> None:
    weight = quantized_weight(drawn(out, width))
    elements, _ = quantize_rows(drawn(rows, width, seed=1))
    found = scaled_product(elements, weight, dtype)
    assert found.dtype == dtype and found.shape == (rows, out)
    expected = dequantized_product(elements, weight, torch.float32)
    # Apart by the order of sums, and by bfloat16's rounding.
    rtol = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.float(), expected, rtol=rtol, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_matrix_is_the_product_of_what_was_quantised(dtype: torch.dtype, with_bias: bool) -> None:
    weight, bias = drawn(48, 80, dtype=dtype), drawn(48, seed=3, dtype=dtype) if with_bias else None
    x = drawn(5, 80, seed=4, dtype=dtype)
    kept, (elements, scales) = quantized_weight(weight), quantize_rows(x)
    expected = (elements[:5].double() * scales) @ (kept.elements.double() * kept.scale).T
    if bias is not None:
        expected += bias.double()
    found = fp8_matrix(weight, bias)(x)
    assert found.dtype == dtype and found.shape == (5, 48)
    steps = {torch.float32: 2**-20, torch.float16: 2**-10, torch.bfloat16: 2**-7}
    torch.testing.assert_close(found.double(), expected, rtol=steps[dtype], atol=steps[dtype] * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_is_close_to_the_one_it_was_made_from(dtype: torch.dtype) -> None:
    weight, x = drawn(256, 512, dtype=dtype), drawn(40, 512, seed=5, dtype=dtype)
    error = relative_error(fp8_matrix(weight)(x), Dense(weight)(x))
    # Measured 0.037 in each dtype: 0.026 for each operand.
    assert 0.02 < error < 0.05


def test_rows_that_sum_up_beyond_float16_without_their_scale_are_finite() -> None:
    weight, x = torch.full((16, 4096), 0.1, dtype=torch.float16), torch.full((2, 4096), 0.01, dtype=torch.float16)
    # 448 * 448 * 4096 before any scale.
    torch.testing.assert_close(fp8_matrix(weight)(x), Dense(weight)(x), rtol=0.02, atol=0)


@BOTH_WAYS
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(quantize: QuantizeRows, poison: float) -> None:
    matrix, x = fp8_matrix(drawn(32, 64), quantize=quantize), drawn(20, 64)
    healthy = matrix(x)
    x[3, 10] = poison
    found = matrix(x)
    assert not found[3].isfinite().any()
    others = [i for i in range(20) if i != 3]
    assert torch.equal(found[others], healthy[others])


def test_rows_beyond_those_given_are_not_seen() -> None:
    def poisoned(x: Tensor) -> tuple[Tensor, Tensor]:
        elements, scales = quantize_rows(x)
        elements[len(x) :].fill_(float("nan"))
        return elements, scales

    weight, x = drawn(32, 64), drawn(3, 64)
    assert torch.equal(fp8_matrix(weight, quantize=poisoned)(x), fp8_matrix(weight)(x))


def test_an_outlier_in_a_weight_leaves_it_finite() -> None:
    weight = drawn(32, 64)
    weight[3, 3] = 1e30
    kept = quantized_weight(weight)
    assert bool(kept.elements.float().isfinite().all())
    assert float(kept.elements[3, 3].float() * kept.scale) == pytest.approx(1e30, rel=1e-6)


def test_a_weight_larger_than_is_quantised_at_once_is_the_same_throughout() -> None:
    weight = drawn(4096 * 2 + 16, 16)
    kept = quantized_weight(weight)
    assert kept.scale.item() == pytest.approx(float(weight.abs().max()) / LARGEST)
    assert torch.equal(bits(kept.elements), bits(quantized(weight, kept.scale)))


# ---- memory -------------------------------------------------------------------------------------


def test_a_matrix_counts_its_bytes_and_keeps_nothing_of_the_weight() -> None:
    weight, bias = drawn(48, 64, dtype=torch.bfloat16), drawn(48, dtype=torch.bfloat16)
    gone = weakref.ref(weight)
    matrix = fp8_matrix(weight, bias)
    del weight
    assert gone() is None
    assert matrix.num_bytes == 48 * 64 + 2 * 4 + 48 * 2


def load_layers(model_dir: Path, make: Fp8Maker | type[Dense]) -> tuple[list[LayerMatrices], int]:
    """The layers, and what the embedding, the head and the last norm take. No layer is there when the next one comes."""
    seen: list[weakref.ref[Tensor]] = []

    def convert(layer: LayerWeights) -> LayerMatrices:
        if make is not Dense:
            assert all(ref() is None for ref in seen)
        seen.extend(map(weakref.ref, (layer.qkv, layer.attention_out, layer.gate_up, layer.down)))
        return layer_matrices(layer, make)

    config = load_model_config(model_dir)
    weights, layers = load_converted(model_dir, config, convert=convert, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert weights.layers == []
    alive = sum(ref() is not None for ref in seen)
    assert alive == (len(seen) if make is Dense else 0)
    return layers, weights.num_bytes


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_model_in_float8_is_read_layer_by_layer_and_lets_go_of_each(tmp_path: Path, architecture: str) -> None:
    make_tiny_model(tmp_path, architecture=architecture)
    whole = load_weights(tmp_path, load_model_config(tmp_path), dtype=torch.bfloat16, device=torch.device("cpu"))
    dense, ends = load_layers(tmp_path, Dense)
    assert ends + sum(layer.num_bytes for layer in dense) == whole.num_bytes
    layers, ends = load_layers(tmp_path, fp8_maker(is_gpu=False, has_triton=False))
    elements = sum(
        layer.qkv.numel() + layer.attention_out.numel() + layer.gate_up.numel() + layer.down.numel() for layer in whole.layers
    )
    scales = len(layers) * 4 * 2 * 4
    assert ends + sum(layer.num_bytes for layer in layers) == whole.num_bytes - elements + scales


def test_a_matrix_that_does_not_fit_stays_as_it_is_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    make = fp8_maker(is_gpu=True, has_triton=False)
    with caplog.at_level(logging.WARNING):
        found = [make(drawn(*shape), None) for shape in ((48, 40), (48, 40), (40, 48), (48, 48))]
    assert [type(matrix) for matrix in found] == [Dense, Dense, Dense, Fp8Matrix]
    assert [record.getMessage() for record in caplog.records] == [
        "quantization fp8: a matrix of 48 x 40 has a dimension that is no multiple of 16; it stays float32",
        "quantization fp8: a matrix of 40 x 48 has a dimension that is no multiple of 16; it stays float32",
    ]
    assert MULTIPLE == 16


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (8, 6)])
def test_gpus_without_float8_say_so(capability: tuple[int, int]) -> None:
    reason = why_no_fp8(capability)
    assert reason is not None and reason.endswith(f"this one has {capability[0]}.{capability[1]}")


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0), None])
def test_later_gpus_have_float8_and_what_is_no_gpu_is_not_refused(capability: tuple[int, int] | None) -> None:
    assert why_no_fp8(capability) is None
