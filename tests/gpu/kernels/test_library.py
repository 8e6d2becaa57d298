"""How the kernels are found, refused and fallen back from."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from repertory.gpu.cpu import library as lib
from repertory.gpu.cpu import paths
from repertory.gpu.cpu.executor import CpuExecutor
from repertory.gpu.cpu.memory import huge_empty, keep_freed_memory
from repertory.protocol.config import EngineConfig
from repertory.protocol.errors import ConfigError
from repertory.tests.gpu.stepping import Stepper
from repertory.tests.tiny_model import make_tiny_model

HERE = Path(lib.__file__).parent
NAME = f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"

needs_library = pytest.mark.skipif(not (HERE / NAME).is_file(), reason="the C kernels are not built")


def executor(model_dir: Path, **settings: Any) -> CpuExecutor:
    defaults = {"dtype": "float32", "num_device_blocks": 50, "num_threads": 1}
    return CpuExecutor(model_dir, config=EngineConfig(model=str(model_dir), **{**defaults, **settings}))


def test_a_missing_library_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(lib.KernelsUnavailableError, match="not built"):
        lib.open_library(tmp_path)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"not a library")
    with pytest.raises(lib.KernelsUnavailableError, match="do not load"):
        lib.open_library(tmp_path)


@needs_library
def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    shutil.copy(HERE / NAME, tmp_path / NAME)
    shutil.copytree(HERE / "kernels", tmp_path / "kernels")
    lib.open_library(tmp_path)
    with (tmp_path / "kernels" / "step.c").open("a") as file:
        file.write("/* later */\n")
    with pytest.raises(lib.KernelsUnavailableError, match="other sources"):
        lib.open_library(tmp_path)


@needs_library
def test_a_library_without_its_sources_is_used(tmp_path: Path) -> None:
    shutil.copy(HERE / NAME, tmp_path / NAME)
    assert lib.open_library(tmp_path).abi_version() == lib.ABI


def test_without_kernels_torch_runs_and_says_why(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise lib.KernelsUnavailableError("the C kernels are not built")

    monkeypatch.setattr(paths, "open_library", missing)
    device = executor(tiny_llama)
    assert device.capacity.device == "cpu (float32, torch since the C kernels are not built, 1 thread)"
    stepper = Stepper(device)
    stepper.add(1, [5, 6, 7])
    assert len(stepper.run(3)[1]) == 3
    with pytest.raises(ConfigError, match="not built"):
        executor(tiny_llama, attention_backend="avx512")


@needs_library
@pytest.mark.parametrize(
    ("architecture", "dtype", "head_dim", "said"),
    [
        ("Qwen2ForCausalLM", "float32", 64, "biases"),
        ("Qwen3ForCausalLM", "float32", 64, "normalised"),
        ("LlamaForCausalLM", "float16", 64, "float16"),
        ("LlamaForCausalLM", "float32", 40, "head_dim 40"),
    ],
)
def test_what_the_kernels_do_not_compute_runs_in_torch(
    tmp_path: Path, architecture: str, dtype: str, head_dim: int, said: str
) -> None:
    device = executor(make_tiny_model(tmp_path, architecture=architecture, head_dim=head_dim), dtype=dtype)
    assert "torch since" in device.capacity.device and said in device.capacity.device


@needs_library
def test_a_backend_can_be_named(tiny_llama: Path) -> None:
    assert executor(tiny_llama, attention_backend="torch").capacity.device == "cpu (float32, torch, 1 thread)"
    portable = executor(tiny_llama, attention_backend="portable", num_threads=2)
    assert portable.capacity.device == "cpu (float32, portable kernels, 2 threads)"
    portable.close()
    portable.close()
    with pytest.raises(ConfigError, match="amx"):
        executor(tiny_llama, attention_backend="amx")  # bfloat16 only


@needs_library
def test_all_backends_sample_the_same_tokens_in_float32(tiny_llama: Path) -> None:
    library, found = lib.open_library(), {}
    levels = [name for level, name in enumerate(lib.LEVELS) if library.has_kernels(level, False)]
    for backend in ("torch", *levels):
        stepper = Stepper(executor(tiny_llama, attention_backend=backend, block_size=4))
        stepper.add(1, [5, 6, 7] * 5)
        stepper.add(2, [9])
        found[backend] = stepper.run(20, chunk=6)
    assert all(tokens == found["torch"] for tokens in found.values())


@pytest.mark.parametrize("shape", [(3, 5), (1 << 20, 3)])
def test_memory_on_huge_pages_is_an_ordinary_aligned_tensor(shape: tuple[int, ...]) -> None:
    keep_freed_memory()
    tensor = huge_empty(shape, torch.bfloat16)
    tensor.fill_(3)
    assert tensor.shape == shape and tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
    assert tensor.float().mean() == 3
