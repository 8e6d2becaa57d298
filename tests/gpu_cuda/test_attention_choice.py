"""Which attention backend a setting comes to, and how that is said."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from repertory.gpu.cuda.attention import choice as choice_module
from repertory.gpu.cuda.attention import flash2
from repertory.gpu.cuda.attention.choice import BACKENDS, Choice, choose_attention, open_attention, why_not
from repertory.gpu.cuda.attention.flash2 import Flash2
from repertory.gpu.cuda.attention.flash3 import Flash3
from repertory.gpu.cuda.attention.torch_gather import TorchGather
from repertory.gpu.cuda.kernels import launch
from repertory.protocol.errors import ConfigError

from . import fake_flash_attn, fake_flash_attn_interface
from .paged_batches import Heads, assert_right, make_batch, make_needs


@pytest.fixture(autouse=True)
def _on_a_gpu_without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled and nothing but Triton is installed, whatever there is here."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(flash2, "installed_version", lambda: None)
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.fixture
def flash_attn_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash2, "installed_version", lambda: "2.8.3")
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)


@pytest.fixture
def flash_attn_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash_attn_interface)


def test_triton_is_taken_where_nothing_else_is_installed_and_says_so() -> None:
    chosen = choose_attention("auto", make_needs(block_size=256))
    assert chosen.name == "triton"
    assert str(chosen) == "triton (flash-attn-3: not installed; flash-attn: not installed)"


def test_the_block_size_is_named_where_it_keeps_flash_attn_out(flash_attn_2: None) -> None:
    chosen = choose_attention("auto", make_needs(block_size=16))
    assert chosen == ("triton", "flash-attn-3: not installed; flash-attn: block_size must be a multiple of 256, not 16")


def test_flash_attn_2_is_taken_where_it_fits(flash_attn_2: None) -> None:
    assert choose_attention("auto", make_needs(block_size=256)) == ("flash-attn", "flash-attn-3: not installed")
    assert choose_attention("auto", make_needs(block_size=256, capability=(8, 0))).name == "flash-attn"


def test_flash_attn_3_comes_before_all(flash_attn_2: None, flash_attn_3: None) -> None:
    assert choose_attention("auto", make_needs()).name == "flash-attn-3"
    assert choose_attention("auto", make_needs(capability=(8, 0), block_size=256)).name == "flash-attn"


def test_flash_attn_3_gives_way_where_it_lets_nan_through(flash_attn_2: None, flash_attn_3: None) -> None:
    chosen = choose_attention("auto", make_needs(block_size=256))
    assert chosen.name == "flash-attn" and "behind a row's context" in chosen.reason


def test_a_build_without_paging_gives_way_with_its_own_words(flash_attn_3: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_flash_attn_interface, "has_paging", False)
    chosen = choose_attention("auto", make_needs())
    assert chosen.name == "triton" and "This flash attention build does not support paged KV." in chosen.reason


def test_a_package_that_does_not_import_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash2, "installed_version", lambda: "2.8.3")
    chosen = choose_attention("auto", make_needs(block_size=256))
    assert chosen.name == "triton" and "flash-attn: it cannot be imported: " in chosen.reason


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"capability": (7, 5)}, "triton: the GPU's compute capability is 7.5, under 8.0"),
        ({"capability": None}, "triton: the device is no GPU"),
        (
            {"capability": (8, 0), "kv_dtype": torch.float8_e4m3fn},
            "triton: a KV pool of float8_e4m3fn needs compute capability 8.9",
        ),
        ({"dtype": torch.float64}, "triton: it computes in float32, float16 and bfloat16, not in float64"),
    ],
)
def test_torch_is_what_is_left_where_triton_cannot_run(facts: dict[str, Any], reason: str) -> None:
    chosen = choose_attention("auto", make_needs(**facts))
    assert chosen.name == "torch" and reason in chosen.reason


@pytest.mark.parametrize(
    "facts",
    [
        {"dtype": torch.float32},
        {"kv_dtype": torch.float8_e4m3fn},
        {"heads": Heads(9, 3, 20)},
        {"block_size": 24, "capability": (8, 0)},
        {"capability": (12, 0)},
        {"capability": (8, 9), "kv_dtype": torch.float8_e4m3fn},
    ],
)
def test_triton_takes_what_flash_attn_does_not(facts: dict[str, Any], flash_attn_2: None, flash_attn_3: None) -> None:
    needs = make_needs(**{"capability": (9, 0), **facts})
    assert choose_attention("auto", needs).name == "triton"


def test_interpreted_kernels_need_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert choose_attention("auto", make_needs(capability=None)).name == "triton"
    assert choose_attention("triton", make_needs(capability=None, kv_dtype=torch.float8_e4m3fn)).name == "triton"


def test_without_triton_torch_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    chosen = choose_attention("auto", make_needs())
    assert chosen.name == "torch" and chosen.reason.endswith("triton: not installed")


def test_a_broken_triton_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "repertory.gpu.cuda.kernels.launch", None)
    chosen = choose_attention("auto", make_needs())
    assert chosen.name == "torch" and "triton: it cannot be imported: " in chosen.reason


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_a_named_backend_is_taken_though_a_better_one_can_run(name: str, flash_attn_3: None) -> None:
    assert choose_attention(name, make_needs()) == (name, "named by attention_backend")


@pytest.mark.parametrize(
    ("name", "facts", "reason", "can"),
    [
        ("flash-attn", {}, "not installed, block_size must be a multiple of 256, not 16", "triton, torch"),
        ("flash-attn-3", {}, "not installed", "triton, torch"),
        ("triton", {"capability": (7, 0)}, "compute capability is 7.0", "torch"),
    ],
)
def test_a_named_backend_that_cannot_run_stops_the_start(name: str, facts: dict[str, Any], reason: str, can: str) -> None:
    with pytest.raises(ConfigError) as raised:
        choose_attention(name, make_needs(**facts))
    message = str(raised.value)
    assert raised.value.key == "attention_backend"
    assert f"attention_backend {name!r} cannot run: " in message and reason in message
    assert message.endswith(f"Those that can here: {can}")


@pytest.mark.parametrize("setting", ["flash", "FLASH-ATTN", "", "amx", "flash_attn"])
def test_an_unknown_name_is_told_the_known_ones(setting: str) -> None:
    with pytest.raises(ConfigError) as raised:
        choose_attention(setting, make_needs())
    assert raised.value.key == "attention_backend"
    assert repr(setting) in str(raised.value) and "auto, flash-attn-3, flash-attn, triton, torch" in str(raised.value)


def test_torch_can_always_run() -> None:
    assert why_not("torch", make_needs(dtype=torch.float32, capability=None, block_size=1)) is None


def test_the_chosen_one_is_opened(flash_attn_2: None, flash_attn_3: None) -> None:
    for name, made in (("flash-attn-3", Flash3), ("flash-attn", Flash2), ("torch", TorchGather)):
        backend = open_attention(Choice(name, ""), make_needs(), max_rows=8, num_sms=132)
        assert type(backend) is made and backend.name == name
        block_size = 256 if name == "flash-attn" else 16
        batch = make_batch([3, 20], [(4, 30)], block_size=block_size, dtype=torch.bfloat16)
        assert_right(backend, batch, tolerance=3e-2)


def test_the_triton_backend_computes_with_what_it_is_told() -> None:
    needs = make_needs(heads=Heads(4, 2, 16), dtype=torch.float32)
    backend = open_attention(Choice("triton", ""), needs, max_rows=8, num_sms=132)
    assert backend.name == "triton"
    batch = make_batch([3, 20], [(4, 30)], block_size=needs.block_size, heads=Heads(4, 2, 16), dtype=torch.float32)
    assert_right(backend, batch, tolerance=1e-5)


def test_a_name_that_was_not_chosen_is_not_opened() -> None:
    with pytest.raises(ValueError, match="none of flash-attn-3, flash-attn, triton, torch"):
        open_attention(Choice("auto", ""), make_needs(), max_rows=1, num_sms=1)


def test_every_backend_has_a_reason_to_give() -> None:
    assert set(choice_module._WHY_NOT) == set(BACKENDS)
