"""Norms, rotations with the KV write, and argmax against torch."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from repertory.gpu.cpu import library as lib
from repertory.gpu.models.decoder import rms_norm
from repertory.gpu.models.rope import rotate, rotation
from repertory.tests.gpu.kernels.calls import KERNELS, LIBRARY, Kernel, assert_near


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    torch.manual_seed(0)
    return request.param


@pytest.mark.parametrize("width", [32, 48, 576, 1040])
def test_a_norm_equals_its_reference(kernel: Kernel, width: int) -> None:
    level, dtype = kernel
    x, weight = torch.randn(3, width).to(dtype), torch.randn(width).to(dtype)
    y = torch.full((4, width), 7.0, dtype=dtype)
    LIBRARY.run_rms_norm(level, dtype is torch.bfloat16, x.data_ptr(), weight.data_ptr(), y.data_ptr(), 3, width, 1e-5)
    expected = rms_norm(x.double(), weight.double(), 1e-5).double()
    assert_near(y[:3], expected, dtype=dtype)
    assert (y[3] == 7).all()


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(16, 4, 2), (32, 1, 1), (64, 9, 3), (96, 2, 1), (128, 4, 2)])
def test_queries_turn_in_place_and_keys_and_values_go_to_their_slots(
    kernel: Kernel, head_dim: int, heads: int, kv_heads: int
) -> None:
    level, dtype = kernel
    tokens, token_stride = 3, kv_heads * head_dim + 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    before = qkv.clone().view(tokens, -1, head_dim)
    cos, sin = rotation(torch.tensor([0, 5, 4000]), 10000.0 ** -torch.linspace(0, 1, head_dim // 2), torch.float32)
    angles = torch.cat((cos, sin), dim=-1).contiguous()
    keys, values = (torch.full((10, token_stride), 7.0, dtype=dtype) for _ in range(2))
    slots = np.array([8, 0, 3]) * token_stride
    call = lib.Rotation(
        qkv.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        slots.ctypes.data,
        angles.data_ptr(),
        heads,
        kv_heads,
        head_dim,
    )
    LIBRARY.run_rotate(level, dtype is torch.bfloat16, ctypes.byref(call), tokens)
    turned = rotate(before[:, : heads + kv_heads].double(), cos.double(), sin.double())
    width = kv_heads * head_dim
    assert_near(qkv.view(tokens, -1, head_dim)[:, :heads], turned[:, :heads], dtype=dtype)
    assert_near(keys[[8, 0, 3], :width], turned[:, heads:].flatten(1), dtype=dtype)
    assert torch.equal(values[[8, 0, 3], :width], before[:, heads + kv_heads :].flatten(1))
    for side in (keys, values):
        assert (side[[1, 2, 4, 5, 6, 7, 9]] == 7).all() and (side[:, width:] == 7).all()


INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("width", [1, 5, 64, 100])
def test_the_largest_logit_is_found_and_unfit_rows_are_told(kernel: Kernel, width: int) -> None:
    def largest(row: torch.Tensor) -> tuple[float, bool]:
        is_unfit = ctypes.c_int64(7)
        return LIBRARY.run_largest(kernel[0], row.data_ptr(), width, ctypes.byref(is_unfit)), bool(is_unfit.value)

    logits = torch.randn(width + 3)
    logits[width:] = NAN  # what lies behind is not read
    assert largest(logits) == (logits[:width].max().item(), False)
    for place in {0, width // 2, width - 1}:
        for value, unfit in ((50.0, False), (NAN, True), (INFINITY, True), (-INFINITY, False)):
            row = logits.clone()
            row[place] = value
            found = largest(row)
            assert found[1] == unfit
            assert unfit or found[0] == row[:width].max().item()
    assert largest(torch.full((width + 3,), -INFINITY)) == (-INFINITY, False)
