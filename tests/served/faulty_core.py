"""A core host whose device hosts have faults (`supervision/faulty_host.py`): `python -m repertory.tests.served.faulty_core`."""

from __future__ import annotations

import os
import sys

from repertory.actors.core_host import main
from repertory.tests.supervision.faulty_host import COMMAND as FAULTY_DEVICE

COMMAND = (sys.executable, "-m", "repertory.tests.served.faulty_core")

if __name__ == "__main__":
    status = main(FAULTY_DEVICE)
    sys.stderr.flush()
    os._exit(status)
