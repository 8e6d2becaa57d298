"""A part's process: `python -m repertory.scripts.gpu_check.part NAME FILE [rehearse]`. Findings go to FILE."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path

from .report import Report


def main(arguments: list[str]) -> int:
    """Run a part; 1 if it raises."""
    name, path, *rest = arguments
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    is_rehearsal = rest == ["rehearse"]
    report = Report(Path(path), is_rehearsal=is_rehearsal)
    try:
        gpu = import_module(f"{__package__}.gpu").Gpu(is_rehearsal=is_rehearsal)
        report.machine(gpu.machine)
        import_module(f"{__package__}.parts.{name}").run(report, gpu)
    except BaseException as error:  # whatever it is, it is what there is to tell of this part
        report.failed(error)
        return 1
    return 0


def _end_with_parent() -> None:
    while sys.stdin.buffer.read(1):
        pass  # nothing is ever sent
    os._exit(1)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # at once: what was found is written, and threads that a failed part left behind are nobody's any more
