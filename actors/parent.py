"""A process that never outlives its parent, whatever way that ends.

Standard input is a pipe whose other end only the parent holds: when it ends, the parent has. A process that is stopped
(SIGSTOP) at that moment could not read it, so the kernel is asked to continue it then. A child leads a session of its
own and ignores SIGINT: Ctrl-C in the parent's terminal is the parent's to hear.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def wake_when_parent_dies() -> None:
    """Have the kernel send SIGCONT to this process when its parent dies (Linux; nothing elsewhere)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))


def remove_folder_of(endpoint: str) -> None:
    """Remove the folder of an `ipc://` endpoint, which was made for it alone, if it is still there."""
    shutil.rmtree(Path(endpoint.removeprefix("ipc://")).parent, ignore_errors=True)
