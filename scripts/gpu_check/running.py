"""Runs parts, each in a process of its own that is ended when its time is up. Standard library only.

a part raises           its process writes the exception down and ends; the next part runs
it dies                 what it said last stands for the exception
it hangs                asked for the stacks of its threads (SIGUSR1), then killed with all that it started
this process ends       each part sees the end of its standard input, and ends
time runs short         a part that could not do anything useful in what is left is not begun
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import IO, NamedTuple

from .catalogue import Part
from .results import PartResult, Results, State, read_records

Command = Callable[[Part, Path], list[str]]
"""What is run for a part; the path is where it writes its findings."""

LAST_WORDS_S = 2.0
"""For a part that hangs to say where, and for what is left to be written at the end."""

_MOST_WORDS = 20_000


class Plan(NamedTuple):
    """How to run the parts: `jobs` of those that measure no time go at once."""

    command: Command
    jobs: int
    say: Callable[[str], None]


def run_all(parts: Sequence[Part], plan: Plan, results: Results, written: Path) -> None:
    """Run `parts` in their order within `results.budget_s` seconds, and write `results` to `written` after each.

    `KeyboardInterrupt` and `SystemExit` end the parts that run, and are raised.
    """
    began = time.monotonic()
    lock = threading.Lock()
    running = Running(plan)

    def take_in(part: Part) -> None:
        result, machine = running.run(part, left_s=results.budget_s - (time.monotonic() - began))
        with lock:
            results.parts.append(result)
            results.machine = results.machine or machine
            results.seconds = time.monotonic() - began
            results.write(written)

    try:
        for together in _groups(parts):
            with ThreadPoolExecutor(plan.jobs) as pool, running.ended_by_exceptions():
                for future in [pool.submit(take_in, part) for part in together]:
                    future.result()
    finally:
        order = [part.name for part in parts]
        results.parts.sort(key=lambda result: order.index(result.name))
        results.write(written)


def _groups(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Parts that may run side by side."""
    for is_timed, group in groupby(parts, key=lambda part: part.is_timed):
        if is_timed:
            yield from ([part] for part in group)
        else:
            yield list(group)


class Running:
    """The processes of the parts."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._processes: set[subprocess.Popen[str]] = set()
        self._is_over = False

    def run(self, part: Part, *, left_s: float) -> tuple[PartResult, dict[str, object]]:
        """Run a part that may take `left_s` seconds and not more than its limit. Returns what it said of the machine too."""
        if self._is_over or left_s < part.least_s:
            words = f"{max(0.0, left_s):.0f} s were left, and it needs {part.least_s:.0f}"
            self._plan.say(f"{part.name}: not begun: {words}")
            return PartResult(part.name, "dropped", error=words), {}
        limit_s = min(part.limit_s, left_s - LAST_WORDS_S)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            records, words_file = Path(folder, "records"), Path(folder, "words")
            with words_file.open("w") as stderr:
                state, ended = self._run(part, records, stderr, limit_s)
            result = PartResult(part.name, state, time.monotonic() - began, limit_s)
            machine = read_records(records, result)
            _explain(result, ended, words_file.read_text(errors="replace"))
        self._plan.say(f"{part.name}: {state} after {result.seconds:.1f} s{result.error and f': {result.error}'}")
        return result, machine

    @contextmanager
    def ended_by_exceptions(self) -> Iterator[None]:
        """Where an exception leaves the block, what runs is killed, and nothing more is begun."""
        try:
            yield
        except BaseException:
            self._is_over = True
            for process in list(self._processes):
                _kill(process)
            raise

    def _run(self, part: Part, records: Path, words: IO[str], limit_s: float) -> tuple[State, int]:
        """The state in which a part ended, and its process's exit status."""
        self._plan.say(f"{part.name}: {part.about} (at most {limit_s:.0f} s)")
        process = subprocess.Popen(
            self._plan.command(part, records),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._processes.add(process)
        progress = threading.Thread(target=self._pass_on, args=(part, process), daemon=True)
        progress.start()
        try:
            state: State = "done" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            state = "cut off"
            process.send_signal(signal.SIGUSR1)
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_S / 2)
        finally:
            _kill(process)
            self._processes.discard(process)
        progress.join(LAST_WORDS_S / 2)
        return state, process.wait()

    def _pass_on(self, part: Part, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._plan.say(f"{part.name}: {line.rstrip()}")


def _kill(process: subprocess.Popen[str]) -> None:
    """End a part and what it started, and let it be buried."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()


def _explain(result: PartResult, ended: int, words: str) -> None:
    """Say what happened where the part itself could not."""
    words = words[-_MOST_WORDS:]
    if result.state == "cut off":
        result.error = f"it took more than {result.limit_s:.0f} s"
        result.traceback = words
    elif result.state == "failed" and not result.error:
        last = words.strip().splitlines()[-1:] or ["it said nothing"]
        how = f"killed by {signal.Signals(-ended).name}" if ended < 0 else f"exit status {ended}"
        result.error, result.traceback = f"{how}: {last[0]}", words


def stderr_line(began: float) -> Callable[[str], None]:
    """Prints lines of progress with the seconds since `began` on standard error."""
    lock = threading.Lock()

    def say(text: str) -> None:
        with lock:
            print(f"[{time.monotonic() - began:6.1f}] {text}", file=sys.stderr, flush=True)

    return say
