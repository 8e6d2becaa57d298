"""Threads that a test starts and whose end it waits for, with what became of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

PATIENCE_S = 60.0

T = TypeVar("T")


def begin(work: Callable[[], T]) -> Future[T]:
    """Run `work` on a thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def until(condition: Callable[[], bool]) -> None:
    """Wait for a fact that nothing announces."""
    tick, left = threading.Event(), PATIENCE_S / 0.001
    while not condition():
        tick.wait(0.001)
        left -= 1
        assert left > 0, "it never came true"
