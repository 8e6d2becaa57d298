"""Files to read, and the command that reads them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from repertory.__main__ import main
from repertory.tests.observability.browser import Browser, find_chromium
from repertory.tests.observability.written import pressed


class Said(NamedTuple):
    """What a command came to."""

    status: int
    out: str
    err: str


@pytest.fixture
def pressed_file(tmp_path: Path) -> Path:
    """The trace of a run with everything in it."""
    return pressed().write(tmp_path / "run.jsonl")


@pytest.fixture
def trace_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Runs `repertory trace ...`."""

    def run(*words: object, stdin: bytes = b"") -> Said:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = main(["trace", *map(str, words)])
        captured = capsys.readouterr()
        return Said(status, captured.out, captured.err)

    return run


@pytest.fixture
def log_lines_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes log lines: mappings as JSON, anything else as it is."""

    def write(*lines: object) -> Path:
        path = tmp_path / "engine.log"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


@pytest.fixture(scope="module")
def running_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless browser; tests are skipped where none is installed."""
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium here: apt-get install chromium, or name one in REPERTORY_CHROMIUM")
    started = Browser(path, tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.fixture
def browser(running_browser: Browser) -> Browser:
    """The browser as it was at first."""
    running_browser.start_over()
    return running_browser
