"""A server whose frontends are plain (`plain_frontend.py`) and whose devices may have faults.

`python -m repertory.tests.served.plain_server CONFIG DRAIN_S [faulty]`, the configuration as JSON.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from repertory.actors.commands.serve import run
from repertory.actors.observing.logs import configure_logging
from repertory.protocol.config import EngineConfig
from repertory.protocol.errors import first_of

from . import faulty_core, plain_frontend

COMMAND = (sys.executable, "-m", "repertory.tests.served.plain_server")


def main() -> int:
    """Serve; the exit status. What kept it from that is printed."""
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    configure_logging(config.log_format, config.log_level)
    commands = {"frontend_command": plain_frontend.COMMAND}
    if sys.argv[3:] == ["faulty"]:
        commands["core_command"] = faulty_core.COMMAND
    try:
        return asyncio.run(run(config, drain_s=float(sys.argv[2]), **commands))
    except Exception as error:
        print(f"{type(first_of(error)).__name__}: {first_of(error)}", file=sys.stderr)  # noqa: T201 - to the test
        return 1


if __name__ == "__main__":
    sys.exit(main())
