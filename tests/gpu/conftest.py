"""Models that several test files read; each is made once a session."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from repertory.gpu.models import gguf
from repertory.gpu.models.source import resolve_model
from repertory.tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def demo_model(request: pytest.FixtureRequest) -> Path:
    """The demo model, converted. Kept between sessions for as long as the converter's source is the same."""
    version = hashlib.sha256(Path(gguf.__file__).read_bytes()).hexdigest()[:8]
    return resolve_model("demo", cache_dir=request.config.cache.mkdir(f"converted-{version}"))
