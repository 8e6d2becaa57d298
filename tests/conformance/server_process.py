"""A server in a process of its own: `python -m repertory.tests.conformance.server_process '{"model": "demo", ...}'`.

Prints its URL once it serves, and ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from repertory import Engine
from repertory.actors.frontends.http.server import serve_embedded


async def _serve(settings: dict[str, Any]) -> None:
    async with Engine(**settings) as engine, serve_embedded(engine) as url:
        print(url, flush=True)  # noqa: T201 - it is what the parent waits for
        await asyncio.to_thread(sys.stdin.read)


@contextmanager
def server_process(**settings: Any) -> Iterator[str]:
    """Runs one with these settings of an engine; gives its URL. What it logs is in the test's output."""
    command = [sys.executable, "-m", "repertory.tests.conformance.server_process", json.dumps(settings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://"), "the server did not start: see what it logged"
            yield url
        finally:
            process.stdin.close()
            try:
                assert process.wait(20) == 0
            except subprocess.TimeoutExpired:
                process.kill()
                raise


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])))
