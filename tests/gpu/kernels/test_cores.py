"""Compute threads without cores of their own are noticed, once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from repertory.gpu.cpu import executor as executor_module
from repertory.gpu.cpu.cores import CoreWatch, too_many_threads, usable_cores
from repertory.gpu.cpu.executor import CpuExecutor
from repertory.protocol.config import EngineConfig


def said(watch: CoreWatch, steps: int, *, wall_s: float, share: float) -> list[str]:
    found = [watch.after_step(wall_s, wall_s * share) for _ in range(steps)]
    return [message for message in found if message]


def test_a_thread_that_waits_for_its_core_is_noticed_once() -> None:
    watch = CoreWatch()
    messages = said(watch, 1000, wall_s=0.1, share=0.5)
    assert len(messages) == 1
    assert "50%" in messages[0]


def test_a_thread_with_its_own_core_is_left_alone() -> None:
    assert said(CoreWatch(), 1000, wall_s=0.1, share=0.95) == []


def test_a_few_slow_steps_are_not_yet_a_finding() -> None:
    watch = CoreWatch()
    assert said(watch, 3, wall_s=30.0, share=0.1) == []
    assert said(watch, 19, wall_s=0.001, share=0.1) != []


def test_more_threads_than_cores_are_told_at_the_start(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert usable_cores() >= 1
    assert too_many_threads(2, 2) is None
    monkeypatch.setattr(executor_module, "usable_cores", lambda: 1)
    config = EngineConfig(model=str(tiny_llama), num_threads=2, num_device_blocks=2)
    with caplog.at_level(logging.WARNING):
        CpuExecutor(tiny_llama, config=config).close()
    assert "2 compute threads on 1 usable cores" in caplog.text
