"""What serving costs: `scripts/bench serve`.

Without arguments: 256 streams on the simulated device, first with the core in a process of its own (`link`: CPU a token of the
frontend's and the core's), then over HTTP (`http-cost`: CPU a token, loop lag P50 and P99), each beside the embedded engine in
the same run. With arguments: `repertory bench serve`, against any OpenAI-compatible server.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    """Run the two benches of parts, or the client."""
    if len(sys.argv) > 1:
        return subprocess.run([sys.executable, "-m", "repertory", "bench", "serve", *sys.argv[1:]], check=False).returncode
    for name in ("link", "http_cost"):
        print(f"--- scripts/bench {name.replace('_', '-')}", flush=True)
        status = subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=False).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
