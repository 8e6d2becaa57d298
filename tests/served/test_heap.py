"""A full collection stops a process for as long as it looks: what was there at its start is not looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NOTE_WHO_FREEZES = """
import gc, os, sys
really = gc.freeze
def freeze():
    really()
    with open(os.environ["FREEZES"], "a") as file:
        print(sys.orig_argv[2].rpartition(".")[2], gc.get_freeze_count(), file=file)
gc.freeze = freeze
"""


@pytest.mark.alone
async def test_each_process_of_a_server_freezes_its_heap_once_before_it_is_ready(
    start_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOTE_WHO_FREEZES)
    said = tmp_path / "freezes"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FREEZES", str(said))
    server = await start_server(frontends=2)
    await server.event("process.ready", 3)
    found = [line.split() for line in said.read_text().splitlines()]
    assert sorted(name for name, _ in found) == ["core_host", "device_host", "plain_frontend", "plain_frontend"]
    assert all(int(count) > 10_000 for _, count in found)
