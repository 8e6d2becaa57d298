"""The stand-ins for flash-attn refuse what the real ones refuse, and have their signatures: else they prove nothing."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from . import fake_flash_attn, fake_flash_attn_interface
from .fake_flash_attn import RefusedError
from .paged_batches import make_batch
from .sdists import SdistNotToBeHadError, sdist_files


@pytest.fixture(scope="module")
def pages() -> dict[str, Any]:
    batch = make_batch([], [(3, 5), (2, 300)], block_size=256, dtype=torch.bfloat16)
    inputs = batch.inputs
    keys = torch.tensor([0, 5, 305], dtype=torch.int32)
    return {
        "q": batch.query, "k": batch.cache.keys, "v": batch.cache.values, "cu_seqlens_q": inputs.query_starts,
        "cu_seqlens_k": keys, "max_seqlen_q": 3, "max_seqlen_k": 300, "causal": True, "block_table": inputs.block_tables,
    }  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    batch = make_batch([5, 300], [], block_size=256, dtype=torch.bfloat16)
    return {
        "q": batch.query[:, None], "k_cache": batch.cache.keys, "v_cache": batch.cache.values, "causal": True,
        "cache_seqlens": batch.inputs.context_lens, "tables": batch.inputs.block_tables,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda given: {"q": given["q"].float()}, "fp16 and bf16"),
        (lambda given: {"k": given["k"].half()}, "same dtype"),
        (lambda given: {"v": given["v"].transpose(2, 3).contiguous().transpose(2, 3)}, "contiguous last dimension"),
        (lambda given: {"block_table": given["block_table"].long()}, "block_table must have dtype"),
        (lambda given: {"block_table": given["block_table"].repeat(1, 2)[:, ::2]}, "block_table must have contiguous"),
        (lambda given: {"block_table": given["block_table"][:1]}, "block_table must have shape"),
        (lambda given: {"block_table": given["block_table"][:, :1]}, "beyond its block table"),
        (lambda given: {"block_table": given["block_table"] + 1000}, "page that is none"),
        (lambda given: {"block_table": None}, "must be a block table"),
        (lambda given: {"k": given["k"][:, :240], "v": given["v"][:, :240]}, "divisible by 256"),
        (lambda given: {"cu_seqlens_q": given["cu_seqlens_q"].long()}, "cu_seqlens_q must have dtype int32"),
        (lambda given: {"cu_seqlens_q": given["cu_seqlens_q"] + 1}, "begin with 0"),
        (lambda given: {"cu_seqlens_q": torch.tensor([0, 5, 3], dtype=torch.int32)}, "must not fall"),
        (lambda given: {"cu_seqlens_q": torch.tensor([0, 2, 4], dtype=torch.int32)}, "number of tokens"),
        (lambda given: {"cu_seqlens_k": given["cu_seqlens_k"].repeat(2)[::2]}, "contiguous"),
        (lambda given: {"cu_seqlens_k": torch.tensor([0, 5], dtype=torch.int32)}, "batch_size"),
        (lambda given: {"max_seqlen_q": 2}, "longer than the bound"),
        (lambda given: {"max_seqlen_k": 299}, "longer than the bound"),
        (lambda given: {"q": given["q"][:, :5]}, "divide number of heads"),
        (lambda given: {"q": given["q"][..., :28]}, "multiple of 8"),
        (lambda given: {"q": torch.empty(5, 6, 33, dtype=torch.bfloat16)[..., :32]}, "16 bytes"),
        (lambda given: {"softmax_scale": 1.0}, "softmax_scale is not emulated"),
        (lambda given: {"window_size": (3, 0)}, "window_size is not emulated"),
    ],
)
def test_varlen_refuses(pages: dict[str, Any], changed: Any, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        fake_flash_attn.flash_attn_varlen_func(**{**pages, **changed(pages)})


def test_varlen_takes_what_is_not_changed(pages: dict[str, Any]) -> None:
    assert fake_flash_attn.flash_attn_varlen_func(**pages).shape == pages["q"].shape


@pytest.mark.parametrize("module", [fake_flash_attn, fake_flash_attn_interface])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda given: {"q": given["q"][:, 0]}, "q must have shape"),
        (lambda given: {"cache_seqlens": given["cache_seqlens"].long()}, "seqlens_k must have dtype"),
        (lambda given: {"cache_seqlens": given["cache_seqlens"][:1]}, "seqlens_k must be contiguous"),
        (lambda given: {"cache_seqlens": 5}, "must be a tensor"),
        (lambda given: {"cache_seqlens": given["cache_seqlens"] + 400}, "beyond its block table"),
        (lambda given: {"k": given["q"]}, "k is not emulated"),
    ],
)
def test_kvcache_refuses(rows: dict[str, Any], module: ModuleType, changed: Any, words: str) -> None:
    tables = {"block_table" if module is fake_flash_attn else "page_table": rows["tables"]}
    given = {name: value for name, value in rows.items() if name != "tables"} | tables
    module.flash_attn_with_kvcache(**given)
    with pytest.raises(RefusedError, match=words):
        module.flash_attn_with_kvcache(**{**given, **changed(given)})


def test_flash_attn_3_refuses_starts_without_a_bound(pages: dict[str, Any]) -> None:
    given = pages
    call = {
        "q": given["q"], "k_cache": given["k"], "v_cache": given["v"], "cu_seqlens_q": given["cu_seqlens_q"],
        "cache_seqlens": torch.tensor([5, 300], dtype=torch.int32), "page_table": given["block_table"], "causal": True,
    }  # fmt: skip
    fake_flash_attn_interface.flash_attn_with_kvcache(**call, max_seqlen_q=3)
    for bound, words in ((None, "must be provided"), (2, "longer than the bound")):
        with pytest.raises(RefusedError, match=words):
            fake_flash_attn_interface.flash_attn_with_kvcache(**call, max_seqlen_q=bound)


def signature(source: str, function: str) -> list[tuple[str, str | None]]:
    """Names and defaults of a function's parameters, in order, read from its module's source. It has no stars."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == function]
    assert len(found) == 1, f"{function} is defined {len(found)} times"
    arguments = found[0].args
    assert not (arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg)
    names = [argument.arg for argument in arguments.args]
    defaults = [None] * (len(names) - len(arguments.defaults)) + [ast.unparse(default) for default in arguments.defaults]
    return list(zip(names, defaults, strict=True))


@pytest.fixture(scope="module")
def real_sources(request: pytest.FixtureRequest) -> dict[str, str]:
    """Source of the real interfaces by its path in the sdist of flash-attn 2.8.3, which also holds that of version 3."""
    members = ["flash_attn/flash_attn_interface.py", "hopper/flash_attn_interface.py"]
    assert request.config.cache is not None
    try:
        sources = sdist_files("flash-attn", "2.8.3", members, request.config.cache.mkdir("sdists"))
    except SdistNotToBeHadError as error:
        pytest.skip(str(error))
    return dict(zip(members, sources, strict=True))


@pytest.mark.parametrize(
    ("stand_in", "member", "function"),
    [
        (fake_flash_attn, "flash_attn/flash_attn_interface.py", "flash_attn_varlen_func"),
        (fake_flash_attn, "flash_attn/flash_attn_interface.py", "flash_attn_with_kvcache"),
        (fake_flash_attn_interface, "hopper/flash_attn_interface.py", "flash_attn_with_kvcache"),
    ],
)
def test_the_stand_ins_have_the_signatures_of_the_real_ones(
    stand_in: ModuleType, member: str, function: str, real_sources: dict[str, str]
) -> None:
    assert signature(real_sources[member], function) == signature(Path(str(stand_in.__file__)).read_text(), function)


def test_a_signature_that_differs_is_seen_to_differ() -> None:
    source = "def f(a, b: int | None = None, c=(-1, -1)):\n    pass\n"
    assert signature(source, "f") == [("a", None), ("b", "None"), ("c", "(-1, -1)")]
    for other in ("def f(a, b=None, c=(-1, 0)): 1", "def f(a, c=(-1, -1), b=None): 1", "def f(a, b, c=(-1, -1)): 1"):
        assert signature(other, "f") != signature(source, "f")
