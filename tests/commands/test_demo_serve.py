"""The demonstration of a server that loses its device: what it says must be true, and nothing may stay behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import repertory
from repertory.scripts.demos.serve import descendants, is_running

DEMO = [sys.executable, str(Path(repertory.__file__).parent / "scripts" / "demo.py"), "serve", "--max-tokens", "24"]
LIMIT_S = 150
"""Far more than it takes, since the machine may have other things to do."""

pytestmark = [pytest.mark.alone, pytest.mark.timeout(2 * LIMIT_S)]


def test_every_stream_survives_the_device_and_says_the_same() -> None:
    done = subprocess.run(DEMO, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    said = " ".join(done.stdout.split())
    assert done.returncode == 0, said + done.stderr
    assert "12 of 12 streams ended with all their 24 tokens, 12 with the same text as undisturbed." in said
    assert "Processes left behind: 0." in said
    assert '"event":"device.lost"' in done.stderr, "the device really died"
    paused_s, calm_s = map(float, re.findall(r"(\d+\.\d+) s(?: at most|\)\.)", said))
    assert paused_s > calm_s


def test_interrupted_it_takes_its_server_with_it() -> None:
    process = subprocess.Popen(DEMO, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    while "serving at" not in (line := process.stdout.readline()):
        assert line, "it ended before it served"
    family = list(descendants(process.pid))
    assert len(family) >= 4, "a server, a core, two frontends, and soon a device"
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    assert process.wait(30) == 130
    process.stdout.close()
    deadline = time.monotonic() + 20
    while any(map(is_running, family)):
        assert time.monotonic() < deadline, [pid for pid in family if is_running(pid)]
        time.sleep(0.02)
