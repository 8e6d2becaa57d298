"""Engines whose device host has faults, and the look at what they leave behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from repertory import Engine

from .faulty_host import COMMAND, VARIABLE, Fault, Plan

GONE_WITHIN_S = 5.0
DEFAULTS = {
    "simulated": {"device": "simulated", "block_size": 4, "num_device_blocks": 256},
    "cpu": {"device": "cpu", "dtype": "float32", "num_threads": 1, "block_size": 4, "num_device_blocks": 256},
}
"""Settings of the two devices that these tests use."""


class Hosts:
    """Opens engines on faulty hosts, and knows what became of those."""

    def __init__(self, folder: Path, models: dict[str, Path], stack: AsyncExitStack) -> None:
        self.folder = folder
        self.models = models
        self._stack = stack

    async def open(self, device: str = "simulated", *faults: Fault, step_s: float = 0.0, **settings: Any) -> Engine:
        """An engine on `device` whose hosts suffer `faults`."""
        self.prepare(*faults, step_s=step_s)
        engine = Engine(model=str(self.models[device]), host_command=COMMAND, **{**DEFAULTS[device], **settings})
        self._stack.push_async_callback(engine.aclose)
        await engine.start()
        return engine

    def prepare(self, *faults: Fault, step_s: float = 0.0) -> None:
        """Write the plan down."""
        (self.folder / "plan").write_bytes(msgspec.json.encode(Plan(list(faults), step_s)))

    @property
    def pids(self) -> list[int]:
        """The process of each life so far."""
        file = self.folder / "lives"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    @property
    def num_deeds(self) -> int:
        """Faults that have happened."""
        file = self.folder / "deeds"
        return len(file.read_text().split()) if file.exists() else 0

    @property
    def left(self) -> list[str]:
        """Folders of sockets, and processes (ended and not waited for counts too)."""
        folders = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("repertory-")]
        return folders + [f"process {pid}" for pid in self.pids if Path(f"/proc/{pid}").exists()]

    async def check_nothing_is_left(self) -> None:
        """No folder, no process, no zombie."""
        async with asyncio.timeout(GONE_WITHIN_S):
            while self.left:  # noqa: ASYNC110 - a fact about other processes
                await asyncio.sleep(0.01)


@pytest.fixture
async def hosts(
    tiny_model: Path, paper_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[dict]
) -> AsyncIterator[Hosts]:
    """Opens engines on faulty hosts. Afterwards nothing of any of them may be left."""
    sockets = tempfile.mkdtemp(prefix="sv-")  # a short name: sockets have a limit
    monkeypatch.setattr(tempfile, "tempdir", sockets)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "plan"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    async with AsyncExitStack() as stack:
        found = Hosts(tmp_path, {"cpu": tiny_model, "simulated": paper_model}, stack)
        yield found
    await found.check_nothing_is_left()
    shutil.rmtree(sockets)


@pytest.fixture
def until() -> Callable[..., Any]:
    """Waits for a fact that nothing announces."""

    async def wait(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.002)

    return wait
