"""The flash-attn backends through stand-ins that check what they are given."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from repertory.gpu.cuda.attention import flash2
from repertory.gpu.cuda.attention.flash2 import Flash2, why_not_flash2
from repertory.gpu.cuda.attention.flash3 import Flash3, why_not_flash3
from repertory.gpu.cuda.attention.trial import why_it_fails

from . import fake_flash_attn, fake_flash_attn_interface
from .paged_batches import Heads, PagedBatch, assert_right, attend_with, make_batch, make_needs

Backend = type[Flash2] | type[Flash3]

DECODES = [1, 256, 257, 3]
CHUNKS = [(5, 5), (17, 300), (1, 9), (16, 256)]
TOLERANCES = [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)]


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash_attn_interface)
    monkeypatch.setattr(flash2, "installed_version", lambda: "2.8.3")
    fake_flash_attn.calls.clear()
    fake_flash_attn_interface.calls.clear()


def batch_for(backend: Backend, decodes: list[int], chunks: list[tuple[int, int]], **options: Any) -> PagedBatch:
    block_size = 256 if backend is Flash2 else 16
    return make_batch(decodes, chunks, **{"block_size": block_size, "dtype": torch.bfloat16, **options})


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("heads", [Heads(6, 2, 64), Heads(2, 2, 80), Heads(3, 1, 256)], ids=str)
@pytest.mark.parametrize("backend", [Flash2, Flash3])
def test_every_row_of_a_mixed_step_is_right(backend: Backend, heads: Heads, dtype: torch.dtype, tolerance: float) -> None:
    batch = batch_for(backend, DECODES, CHUNKS, heads=heads, dtype=dtype, spare_columns=3)
    assert_right(backend(), batch, tolerance=tolerance)


@pytest.mark.parametrize("block_size", [1, 3, 16, 24, 100])
def test_flash_attn_3_takes_pages_of_any_size(block_size: int) -> None:
    assert_right(Flash3(), batch_for(Flash3, [1, 50, 7], [(9, 60), (4, 4)], block_size=block_size), tolerance=3e-2)


def test_flash_attn_2_takes_pages_of_several_times_256() -> None:
    assert_right(Flash2(), batch_for(Flash2, [1, 700], [(9, 600)], block_size=512), tolerance=3e-2)


@pytest.mark.parametrize("backend", [Flash2, Flash3])
@pytest.mark.parametrize(("decodes", "chunks"), [([7], []), ([], [(7, 7)]), ([], [(1, 1), (1, 300)]), ([257] * 3, [])])
def test_a_step_of_one_kind_of_rows_is_right(backend: Backend, decodes: list[int], chunks: list[tuple[int, int]]) -> None:
    assert_right(backend(), batch_for(backend, decodes, chunks), tolerance=3e-2)


def test_a_mixed_step_is_two_calls_and_a_step_of_one_kind_is_one() -> None:
    for decodes, chunks, names in (
        ([5, 9], [(3, 3), (2, 8)], ["flash_attn_with_kvcache", "flash_attn_varlen_func"]),
        ([5, 9], [], ["flash_attn_with_kvcache"]),
        ([], [(3, 3)], ["flash_attn_varlen_func"]),
        ([], [], []),
    ):
        fake_flash_attn.calls.clear()
        attend_with(Flash2(), batch_for(Flash2, decodes, chunks))
        assert fake_flash_attn.calls == names
    attend_with(Flash3(), batch_for(Flash3, [5, 9], [(3, 3), (2, 8)]))
    assert fake_flash_attn_interface.calls == ["flash_attn_with_kvcache"] * 2


@pytest.mark.parametrize("backend", [Flash2, Flash3])
def test_bounds_that_are_larger_than_the_step_do_no_harm(backend: Backend) -> None:
    assert_right(backend(), batch_for(backend, [5, 300], [(3, 3), (2, 280)], slack=1000, spare_columns=9), tolerance=3e-2)


def test_block_tables_are_passed_without_columns_that_no_row_can_need(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    plain = fake_flash_attn.flash_attn_with_kvcache

    def measured(*arguments: Any, block_table: Tensor, **options: Any) -> Tensor:
        widths.append(block_table.shape[1])
        return plain(*arguments, block_table=block_table, **options)

    monkeypatch.setattr(fake_flash_attn, "flash_attn_with_kvcache", measured)
    attend_with(Flash2(), batch_for(Flash2, [5, 512], [], spare_columns=60))
    attend_with(Flash2(), batch_for(Flash2, [5, 513], [], spare_columns=60))
    assert widths == [2, 3]


@pytest.mark.parametrize("backend", [Flash2, Flash3])
def test_the_next_step_is_not_attended_with_the_starts_of_the_one_before(backend: Backend) -> None:
    opened = backend()
    for chunks in ([(5, 20), (3, 3)], [(3, 3), (5, 20)], [(8, 40)]):
        assert_right(opened, batch_for(backend, [4], chunks), tolerance=3e-2)


@pytest.mark.parametrize("backend", [Flash2, Flash3])
def test_rows_and_tokens_beyond_the_counts_are_left_alone(backend: Backend) -> None:
    batch = batch_for(backend, [4, 9], [(3, 3), (5, 20)])
    fewer = dataclasses.replace(batch.inputs, num_chunks=1, num_chunk_tokens=3)
    out = torch.full_like(batch.query, 7.0)
    backend().attend(batch.query, batch.cache, fewer, out)
    torch.testing.assert_close(out[:5].double(), batch.expected[:5], atol=3e-2, rtol=3e-2)
    assert (out[5:] == 7.0).all()


def test_decode_steps_of_both_can_be_captured() -> None:
    assert Flash2.can_be_captured and Flash3.can_be_captured


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"block_size": 16}, "block_size must be a multiple of 256, not 16"),
        ({"dtype": torch.float32}, "not in float32"),
        ({"kv_dtype": torch.float8_e4m3fn}, "KV pool must be bfloat16 too, not float8_e4m3fn"),
        ({"heads": Heads(4, 4, 20)}, "head_dim must be a multiple of 8 up to 256, not 20"),
        ({"heads": Heads(4, 4, 264)}, "head_dim must be a multiple of 8 up to 256, not 264"),
        ({"heads": Heads(6, 4, 64)}, "6 heads are no multiple of 4 KV heads"),
        ({"capability": (7, 5)}, "compute capability is 7.5, under 8.0"),
        ({"capability": None}, "the device is no GPU"),
    ],
)
def test_flash_attn_2_says_why_it_cannot_be_used(facts: dict[str, Any], reason: str) -> None:
    assert reason in str(why_not_flash2(make_needs(**{"block_size": 256, **facts})))


@pytest.mark.parametrize(
    ("version", "is_known"),
    [
        ("2.8.0.post2", True),
        ("2.8.3", True),
        ("2.8.3.post2", True),
        ("2.8.3+cu12torch2.8", True),
        ("2.7.4.post1", False),
        ("2.8.4", False),
        ("3.0.0b1", False),
        ("unknown", False),
        (None, False),
    ],
)
def test_only_versions_that_were_read_are_used(version: str | None, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash2, "installed_version", lambda: version)
    reason = why_not_flash2(make_needs(block_size=256))
    assert reason is None if is_known else ("installed" in str(reason))


def test_all_reasons_are_given_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash2, "installed_version", lambda: None)
    reason = why_not_flash2(make_needs(dtype=torch.float32, capability=(7, 0)))
    assert reason is not None and reason.count(", ") >= 3 and reason.startswith("not installed")


def test_flash_attn_is_looked_for_by_the_name_of_its_distribution() -> None:
    flash2_again = ModuleType("flash2_again")
    exec(Path(flash2.__file__).read_text().replace("from .", "from repertory.gpu.cuda.attention."), flash2_again.__dict__)
    assert flash2_again.installed_version() is None  # though `flash_attn` can be imported here


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"dtype": torch.float32}, "not in float32"),
        ({"kv_dtype": torch.float8_e4m3fn}, "not float8_e4m3fn"),
        ({"heads": Heads(4, 4, 20)}, "not 20"),
        ({"capability": (8, 0)}, "compute capability is 8.0, not 9.x"),
        ({"capability": (10, 0)}, "compute capability is 10.0, not 9.x"),
        ({"capability": None}, "the device is no GPU"),
    ],
)
def test_flash_attn_3_says_why_it_cannot_be_used(facts: dict[str, Any], reason: str) -> None:
    assert reason in str(why_not_flash3(make_needs(**facts)))


def test_flash_attn_3_is_not_installed_where_its_module_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_flash3(make_needs()) is None
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    assert why_not_flash3(make_needs()) == "not installed"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_both_pass_the_trial(dtype: torch.dtype) -> None:
    assert why_it_fails(Flash2(), make_needs(block_size=256, dtype=dtype)) is None
    assert why_it_fails(Flash2(), make_needs(block_size=512, heads=Heads(2, 2, 80), dtype=dtype)) is None
    for block_size in (16, 24, 257):
        assert why_it_fails(Flash3(), make_needs(block_size=block_size, dtype=dtype)) is None


def test_a_build_without_paging_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_flash_attn_interface, "has_paging", False)
    assert "does not support paged KV" in str(why_it_fails(Flash3(), make_needs()))


@pytest.mark.parametrize(("block_size", "lets_through"), [(16, False), (64, False), (128, True), (256, True)])
def test_a_kernel_that_lets_nan_through_fails_the_trial(block_size: int, lets_through: bool) -> None:
    reason = why_it_fails(Flash3(), make_needs(block_size=block_size))
    assert reason == ("in a trial it gave NaN, which lies in the pool behind a row's context only" if lets_through else None)


def test_a_function_with_other_parameters_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_flash_attn_interface, "flash_attn_with_kvcache", lambda q, k_cache, v_cache, block_table: q)
    assert "unexpected keyword argument" in str(why_it_fails(Flash3(), make_needs()))


@pytest.mark.parametrize("wrong_by", ["a key more", "no mask"])
def test_a_kernel_that_computes_something_else_fails_the_trial(wrong_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fake_flash_attn.flash_attn_varlen_func

    def wrong(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **options: Any) -> Tensor:
        if wrong_by == "a key more":  # of the first chunk's first token
            q = torch.cat((q[1:], q[-1:]))
        return plain(q, k, v, causal=causal and wrong_by != "no mask", **options).flip(0 if wrong_by == "a key more" else ())

    monkeypatch.setattr(fake_flash_attn, "flash_attn_varlen_func", wrong)
    assert why_it_fails(Flash2(), make_needs(block_size=256)) == "it computed something else than attention in a trial"
