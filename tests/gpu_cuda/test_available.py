"""A GPU that is not there is refused in words, before anything heavy is imported."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from repertory.actors.device import check_buildable, on_this_machine
from repertory.gpu.cuda import available
from repertory.protocol.config import EngineConfig
from repertory.protocol.errors import ConfigError


def driver(*, init: int = 0, count: int = 1, counting: int = 0) -> Any:
    def device_count(pointer: Any) -> int:
        pointer._obj.value = count
        return counting

    return SimpleNamespace(cuInit=lambda flags: init, cuDeviceGetCount=device_count)


@pytest.mark.parametrize(
    ("found", "ordinal", "words"),
    [
        (None, 0, "no NVIDIA driver"),
        (driver(init=100), 0, "sees no device"),
        (driver(count=0), 0, "sees no device"),
        (driver(init=803), 0, "does not start (CUDA error 803)"),
        (driver(counting=3), 0, "does not start (CUDA error 3)"),
        (driver(count=1), 1, "this machine has 1 CUDA device, numbered from 0; there is no number 1"),
        (driver(count=2), 7, "this machine has 2 CUDA devices"),
    ],
)
def test_why_there_is_none_is_said(monkeypatch: pytest.MonkeyPatch, found: Any, ordinal: int, words: str) -> None:
    monkeypatch.setattr(available, "_driver", lambda: found)
    monkeypatch.setattr(available, "_why_not_torch", lambda: None)
    assert words in str(available.why_no_cuda(ordinal))


def torch_of(tmp_path: Path, version: str | None) -> Any:
    (tmp_path / "__init__.py").touch()
    if version is not None:
        (tmp_path / "version.py").write_text(version)
    return SimpleNamespace(origin=str(tmp_path / "__init__.py"))


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("cuda: Optional[str] = None\n", "a build without CUDA"),
        ("cuda = None\n", "a build without CUDA"),
        ("cuda: Optional[str] = '13.0'\n", None),
        ("hip: Optional[str] = None\ncuda = '12.8'\n", None),
        (None, None),
    ],
)
def test_a_torch_without_cuda_is_known_by_its_version_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str | None, words: str | None
) -> None:
    monkeypatch.setattr(available, "_driver", driver)
    monkeypatch.setattr(available.importlib.util, "find_spec", lambda name: torch_of(tmp_path, version))
    reason = available.why_no_cuda()
    assert reason is None if words is None else words in str(reason)


def test_a_driver_library_that_does_not_load_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert available._driver() is None


def test_the_refusal_comes_before_any_heavy_import() -> None:
    program = (
        "import sys\n"
        "from repertory.actors.device import check_buildable\n"
        "from repertory.gpu.cuda import available\n"
        "from repertory.protocol.config import EngineConfig\n"
        "available._driver = lambda: None\n"
        "try:\n"
        "    check_buildable(EngineConfig(model='m', device='cuda:1'))\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error.key, error)\n"
        "print(sorted({'torch', 'triton', 'transformers', 'numpy', 'flash_attn'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    first, second = done.stdout.splitlines()
    assert (
        first
        == "ConfigError device device 'cuda:1' is not to be had: this machine has no NVIDIA driver (libcuda was not found)"
    )
    assert second == "[]"


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="m")
    monkeypatch.setattr("repertory.actors.device.why_no_cuda", lambda ordinal=0: None)
    assert on_this_machine(config).device == "cuda"
    assert on_this_machine(config).token_budget == 2048
    for named in ("cpu", "simulated", "cuda:1"):
        assert on_this_machine(EngineConfig(model="m", device=named)).device == named
    monkeypatch.setattr("repertory.actors.device.why_no_cuda", lambda ordinal=0: "none")
    assert on_this_machine(config) is config


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "fp8"}, "quantization: 'fp8' needs a GPU, and device is cpu"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: 'fp8' needs a GPU"),
        ({"quantization": "awq"}, "quantization: 'awq' is not supported; there is fp8"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype: 'int8' is not supported; there is fp8"),
    ],
)
def test_what_only_a_gpu_does_is_refused_elsewhere(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_buildable(EngineConfig(model="m", device="cpu", **settings))
    assert words in str(refusal.value)
    assert refusal.value.key in settings
