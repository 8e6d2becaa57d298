"""Starts the check where nothing is installed: the checkout becomes importable as `repertory`, fetched wheels beside it.

Run as a file, by `scripts/gpu-check`. What it makes is in a temporary folder that is gone at the end.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run `command.main` on the arguments; its exit status."""
    # As exceptions, so that the folder goes, and the parts' processes with it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        # The root of the checkout is the package, whatever its folder is called.
        Path(folder, "repertory").symlink_to(ROOT)
        sys.path.insert(0, folder)
        wheels = import_module("repertory.scripts.gpu_check.wheels")
        site = Path(folder, "site")
        wheels.unpack(ROOT / wheels.FOLDER, site)
        sys.path.insert(1, str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        command = import_module("repertory.scripts.gpu_check.command")
        status: int = command.main(sys.argv[1:], ROOT)
        return status


if __name__ == "__main__":
    sys.exit(main())
