"""The gathering backend, which the others are compared with, so it is compared with attention written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from repertory.gpu.cuda.attention.torch_gather import TorchGather, open_varlen

from .paged_batches import SMALL, Heads, assert_right, attend_plainly, attend_with, make_batch, make_needs

DECODES = [1, 16, 17, 40, 3]
CHUNKS = [(5, 5), (17, 40), (1, 9), (2, 33), (16, 16)]


def backend_for(heads: Heads = SMALL, **facts: Any) -> TorchGather:
    return TorchGather(make_needs(heads=heads, dtype=torch.float32, **facts))


@pytest.mark.parametrize(
    "heads", [Heads(6, 2, 64), Heads(2, 2, 80), Heads(8, 1, 96), Heads(8, 2, 128), Heads(3, 1, 256)], ids=str
)
@pytest.mark.parametrize("block_size", [1, 16, 24, 256])
def test_every_row_of_a_mixed_step_is_right(heads: Heads, block_size: int) -> None:
    batch = make_batch(DECODES, CHUNKS, block_size=block_size, heads=heads, spare_columns=2)
    assert_right(backend_for(heads, block_size=block_size), batch, tolerance=1e-5)


@pytest.mark.parametrize(("decodes", "chunks"), [([7], []), ([], [(7, 7)]), ([], [(1, 1)]), ([1], [])])
def test_a_step_of_one_kind_of_rows_is_right(decodes: list[int], chunks: list[tuple[int, int]]) -> None:
    assert_right(backend_for(), make_batch(decodes, chunks, block_size=16), tolerance=1e-5)


def test_a_step_without_rows_writes_nothing() -> None:
    assert attend_with(backend_for(), make_batch([], [], block_size=16)).shape == (0, 6, 32)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_half_precision_is_right_up_to_its_rounding(dtype: torch.dtype, tolerance: float) -> None:
    backend = TorchGather(make_needs(dtype=dtype))
    assert_right(backend, make_batch(DECODES, CHUNKS, block_size=16, dtype=dtype), tolerance=tolerance)


def test_a_float8_pool_is_widened_and_scaled() -> None:
    batch = make_batch(DECODES, CHUNKS, block_size=16, kv_dtype=torch.float8_e4m3fn)
    assert batch.cache.key_scale != batch.cache.value_scale
    assert_right(backend_for(kv_dtype=torch.float8_e4m3fn), batch, tolerance=1e-5)


def test_the_next_step_is_not_attended_with_the_lengths_of_the_one_before() -> None:
    backend = backend_for()
    for contexts in ([20, 3], [3, 20], [1, 1, 1]):
        assert_right(backend, make_batch(contexts, [], block_size=16), tolerance=1e-5)


def test_layers_of_one_step_share_what_is_derived_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, batch = backend_for(), make_batch(DECODES, CHUNKS, block_size=16)
    first = attend_with(backend, batch)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("the device was waited for in a second layer"))
    assert torch.equal(attend_with(backend, batch), first)


def test_without_a_gpu_torch_attends_row_by_row() -> None:
    assert backend_for().way == "scaled_dot_product_attention"
    assert not backend_for().can_be_captured


def attend_varlen(query: Tensor, keys: Tensor, values: Tensor, rest: tuple[Any, ...], *, is_causal: bool) -> Tensor:
    query_starts, key_starts, longest_query, longest_context = rest
    assert query_starts.dtype == key_starts.dtype == torch.int32 and keys.is_contiguous() and values.is_contiguous()
    assert query_starts[0] == key_starts[0] == 0 and query_starts[-1] == len(query) and key_starts[-1] == len(keys)
    assert longest_query == query_starts.diff().max() and longest_context == key_starts.diff().max()
    out = torch.empty_like(query)
    for q, q_end, k, k_end in zip(query_starts, query_starts[1:], key_starts, key_starts[1:], strict=False):
        out[q:q_end] = attend_plainly(query[q:q_end], keys[k:k_end], values[k:k_end], is_causal=is_causal)
    return out


def of_torch_2_10(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False, return_aux: None = None,
) -> Tensor:  # fmt: skip
    assert query.shape[1] == key.shape[1]
    return attend_varlen(query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k), is_causal=is_causal)


def of_torch_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: None = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    assert query.shape[1] == key.shape[1] and scale is None
    return attend_varlen(query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k), is_causal=window_size == (-1, 0))


def of_torch_2_13(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: None = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    seqused_k: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    assert enable_gqa == (query.shape[1] != key.shape[1]) and num_splits == 1 and block_table is seqused_k is None
    return attend_varlen(query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k), is_causal=window_size == (-1, 0))


@pytest.mark.parametrize("version", [of_torch_2_10, of_torch_2_11, of_torch_2_13])
@pytest.mark.parametrize("heads", [SMALL, Heads(2, 2, 32)], ids=str)
def test_varlen_attn_is_called_as_each_version_wants_it(
    version: Callable[..., Tensor], heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", version)
    backend = backend_for(heads)
    assert backend.way == "varlen_attn"
    assert_right(backend, make_batch(DECODES, CHUNKS, block_size=16, heads=heads, spare_columns=1), tolerance=1e-5)
    assert attend_with(backend, make_batch([], [], block_size=16, heads=heads)).shape[0] == 0


def test_a_varlen_attn_that_is_causal_from_the_upper_left_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def upper_left(query: Tensor, keys: Tensor, values: Tensor, *rest: Any, window_size: tuple[int, int]) -> Tensor:
        out = attend_varlen(query, keys, values, rest, is_causal=True)
        start, context = int(rest[0][1]), int(rest[1][1])
        shifted = attend_plainly(
            query[start:], keys[context : context + len(query) - start], values[context:][: len(query) - start]
        )
        return torch.cat((out[:start], shifted))

    monkeypatch.setattr(varlen, "varlen_attn", upper_left)
    assert backend_for(Heads(2, 2, 32)).way == "scaled_dot_product_attention"


def test_a_varlen_attn_that_says_nothing_of_causality_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value: query)
    assert open_varlen(make_needs()) is None


def test_a_torch_without_varlen_attn_attends_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(varlen, "varlen_attn")
    assert backend_for().way == "scaled_dot_product_attention"
