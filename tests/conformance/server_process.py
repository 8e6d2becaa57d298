"""`repertory serve` as its users run it: a command, and the URL that it prints."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENDS_WITHIN_S = 20.0


@contextmanager
def server_process(**settings: Any) -> Iterator[str]:
    """Runs one with these settings of an engine; gives its URL. What it logs is in the test's output."""
    with running_server(**settings) as (url, _):
        yield url


@contextmanager
def running_server(**settings: Any) -> Iterator[tuple[str, int]]:
    """The same, with the process's id: the parent of all others."""
    flags = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "repertory", "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            words = process.stdout.readline().split()
            assert words[:2] == ["serving", "at"], "the server did not start: see what it logged"
            yield words[2], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                assert process.wait(ENDS_WITHIN_S) == 0
            except subprocess.TimeoutExpired:
                process.kill()
                raise
