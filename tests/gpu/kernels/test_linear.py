"""Linear layers of every instruction set against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from repertory.tests.gpu.kernels.calls import (
    ADD,
    KERNELS,
    LIBRARY,
    LOGITS,
    PLAIN,
    SILU_MUL,
    Kernel,
    assert_near,
    linear,
    rounded_up,
)

ROWS = [1, 2, 3, 5, 8, 12, 13, 16, 17, 31, 32, 33, 65, 600]
SOME_ROWS = [1, 7, 16, 17, 34, 530]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    torch.manual_seed(0)
    return request.param


def inputs(kernel: Kernel, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(m, k).to(kernel[1]), (torch.randn(n, k) / k**0.5).to(kernel[1])


@pytest.mark.parametrize("m", ROWS)
def test_a_product_equals_its_reference_and_stays_in_its_place(kernel: Kernel, m: int) -> None:
    x, weights = inputs(kernel, m, 96, 160)
    y = torch.full((m + 1, 100), 7.0, dtype=kernel[1])
    linear(kernel, x, weights, y, PLAIN)
    expected = F.linear(x.double(), weights.double())
    assert_near(y[:m, :96], expected, dtype=kernel[1])
    assert (y[m:] == 7).all() and (y[:, 96:] == 7).all()


@pytest.mark.parametrize("m", [1, 17, 33, 100, 290])
@pytest.mark.parametrize("k", [608, 1312])
def test_a_deep_product_equals_its_reference(kernel: Kernel, m: int, k: int) -> None:
    x, weights = inputs(kernel, m, 96, k)
    y = torch.randn(m + 1, 96).to(kernel[1])
    before = y.clone()
    linear(kernel, x, weights, y, ADD)
    assert_near(y[:m], before[:m].double() + F.linear(x.double(), weights.double()), dtype=kernel[1])
    assert torch.equal(y[m:], before[m:])


@pytest.mark.parametrize("m", SOME_ROWS)
def test_a_residual_is_added_to(kernel: Kernel, m: int) -> None:
    x, weights = inputs(kernel, m, 64, 96)
    y = torch.randn(m + 1, 64).to(kernel[1])
    before = y.clone()
    linear(kernel, x, weights, y, ADD)
    expected = before[:m].double() + F.linear(x.double(), weights.double())
    assert_near(y[:m], expected, dtype=kernel[1])
    assert torch.equal(y[m:], before[m:])


@pytest.mark.parametrize("m", SOME_ROWS)
def test_gate_and_up_are_multiplied_after_silu(kernel: Kernel, m: int) -> None:
    x, weights = inputs(kernel, m, 2 * 96, 64)
    y = torch.full((m + 1, 96), 7.0, dtype=kernel[1])
    linear(kernel, x, weights, y, SILU_MUL)
    gate, up = F.linear(x.double(), weights.double()).chunk(2, dim=-1)
    assert_near(y[:m], F.silu(gate) * up, dtype=kernel[1])
    assert (y[m:] == 7).all()


def test_silu_of_large_gates_neither_overflows_nor_vanishes(kernel: Kernel) -> None:
    x = torch.tensor([[300.0], [-300.0], [40.0]]).expand(3, 32).contiguous().to(kernel[1])
    weights = torch.ones(64, 32, dtype=kernel[1])
    weights[32:] = 1 / 32
    y = torch.empty(3, 32, dtype=kernel[1])
    linear(kernel, x, weights, y, SILU_MUL)
    torch.testing.assert_close(y[:, 0].double(), torch.tensor([2.88e6, 0.0, 51200.0]).double(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("n", [1, 31, 100, 320])
def test_logits_are_float32_for_a_vocabulary_of_any_size(kernel: Kernel, n: int) -> None:
    x, weights = inputs(kernel, 5, n, 64)
    y = torch.empty(5, rounded_up(n, LIBRARY.panel_columns(kernel[0], kernel[1] is torch.bfloat16)))
    linear(kernel, x, weights, y, LOGITS)
    torch.testing.assert_close(y[:, :n].double(), F.linear(x.double(), weights.double()), atol=2e-5, rtol=0)


@pytest.mark.parametrize("k", [320, 1312])
def test_a_row_does_not_depend_on_the_rows_beside_it(kernel: Kernel, k: int) -> None:
    x, weights = inputs(kernel, 70, 64, k)
    together = torch.empty(70, 64, dtype=kernel[1])
    linear(kernel, x, weights, together, PLAIN)
    for row in (0, 15, 16, 33, 69):
        alone = torch.empty(1, 64, dtype=kernel[1])
        linear(kernel, x[row : row + 1], weights, alone, PLAIN)
        assert torch.equal(alone[0], together[row])


def test_a_row_that_is_not_finite_spoils_no_other(kernel: Kernel) -> None:
    x, weights = inputs(kernel, 20, 64, 64)
    clean, spoilt = (torch.empty(20, 64, dtype=kernel[1]) for _ in range(2))
    linear(kernel, x, weights, clean, PLAIN)
    x[7, 3] = float("nan")
    linear(kernel, x, weights, spoilt, PLAIN)
    assert spoilt[7].isnan().all()
    assert torch.equal(torch.cat((spoilt[:7], spoilt[8:])), torch.cat((clean[:7], clean[8:])))
