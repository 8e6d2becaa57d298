"""The file behind a trace: lines are encoded and written by a thread, a moment after they were handed over.

The scheduler pays for the entry that it hands over, a small one (`recorder.py`), and for putting it on a list: records that
grow with tokens are made on the thread too. What the thread has written is in the operating system's hands, so a process
that dies loses the last `FLUSH_S` seconds. The backlog is bounded: a disk that does not follow ends the trace, with a line
that says so, and never the engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import msgspec

from ...protocol.errors import ConfigError
from ...protocol.trace import Record

FLUSH_S = 0.05
MOST_BEHIND = 100_000
"""Entries that may wait to be written."""

Entry = TypeVar("Entry")


class TraceFile(Generic[Entry]):
    """Writes what `to_records` makes of each entry, in order, on a thread of its own; `last` makes the last line.

    `on_failure` is called on that thread, with the reason, if writing ends before `close`.
    Raises `ConfigError` where the file cannot be opened.
    """

    def __init__(
        self,
        path: str,
        to_records: Callable[[Entry], Iterable[Record]],
        last: Callable[[str], Record],
        *,
        on_failure: Callable[[str], None],
        most_behind: int = MOST_BEHIND,
    ) -> None:
        try:
            _keep_earlier(Path(path))
            self._file: BinaryIO = Path(path).open("wb")  # noqa: SIM115 - it is closed with the thread
        except OSError as error:
            raise ConfigError(f"trace_file: cannot write {path}: {error.strerror or error}", key="trace_file") from None
        self._to_records = to_records
        self._last = last
        self._on_failure = on_failure
        self._most_behind = most_behind
        self._encoder = msgspec.json.Encoder()
        self._entries: deque[Entry] = deque()
        self._is_open = True
        self._closing = threading.Event()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._write_on, name="repertory-trace", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Hand `entry` over; it must not change any more. Nothing happens once writing has ended."""
        if not self._is_open:
            return
        if len(self._entries) >= self._most_behind:
            self._is_open = False
            self._failure = f"the disk does not follow: {self._most_behind} lines behind"
            self._closing.set()
            return
        self._entries.append(entry)

    def close(self) -> None:
        """Write what is left and the last line, and close the file. Idempotent."""
        self._is_open = False
        self._closing.set()
        self._thread.join()

    def _write_on(self) -> None:
        try:
            with self._file:
                while not self._closing.wait(FLUSH_S):
                    self._write_waiting()
                self._write_waiting()
                self._write([self._last(self._failure or "closed")])
        except Exception as error:  # whatever it was, the engine goes on without a trace, and is told why
            self._failure = repr(error)
        if self._failure is not None:
            self._is_open = False
            self._entries.clear()
            self._on_failure(self._failure)

    def _write_waiting(self) -> None:
        count = len(self._entries)  # what comes meanwhile is for the next time
        if count:
            self._write(record for _ in range(count) for record in self._to_records(self._entries.popleft()))

    def _write(self, records: Iterable[Record]) -> None:
        lines = bytearray()
        for record in records:
            lines += self._encoder.encode(record)
            lines += b"\n"
        self._file.write(lines)
        self._file.flush()


def _keep_earlier(path: Path) -> None:
    """What an earlier run, or a core that has died, has written is kept as `PATH.1`."""
    if path.is_file() and path.stat().st_size:
        path.replace(path.with_name(path.name + ".1"))
