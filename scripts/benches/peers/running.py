"""Driver processes on one core, and the rounds in which each has its turn."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .installing import Launch, engine_environ
from .reckoning import Reply, Results

T = TypeVar("T")

START_LIMIT_S = 900.0
REPLY_LIMIT_S = 600.0
GOODBYE_S = 30.0
WARM_UP = 40
"""A repetition that is measured by nobody: its prompts are others."""


class EngineLost(Exception):
    """A driver ended, or was ended because it took too long; the message has its last words."""


class Driver:
    """One engine on `core`, started at once. Its stderr goes to `log`. Close it, or use it as a context manager."""

    def __init__(self, name: str, launch: Launch, arguments: Iterable[str], *, core: int, log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                ["taskset", "-c", str(core), *launch.command, *arguments],
                env=engine_environ(launch.environ),
                cwd=log.parent,  # not where a folder may have the name of a library
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def ready(self) -> str:
        """Wait until it can be asked; returns what it calls itself. Raises `EngineLost`."""
        return str(self._line(START_LIMIT_S)["ready"])

    def ask(self, workload: str, repetition: int, *, small: bool) -> Reply:
        """Have it run a workload. Raises `EngineLost`."""
        assert self._process.stdin is not None
        try:
            print(
                json.dumps({"workload": workload, "repetition": repetition, "small": small}),
                file=self._process.stdin,
                flush=True,
            )
        except BrokenPipeError:
            raise EngineLost(self._last_words()) from None
        return self._line(REPLY_LIMIT_S)

    def _line(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(limit_s, self._kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise EngineLost(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1].strip()[:200] if lines else 'it said nothing'}; see {self._log}"

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let it end; make it end if it does not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it may have ended already
            self._process.stdin.close()
        try:
            self._process.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Rounds:
    """Which engine runs what, and what they answered. Engines that are lost are named and left out from there on."""

    def __init__(self, *, repetitions: int, small: bool, say: Callable[[str], None]) -> None:
        self.results: Results = {}
        self.names: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        self._repetitions = repetitions
        self._small = small
        self._say = say

    def run(self, starts: dict[str, Callable[[], Driver]], workloads: dict[str, Iterable[str]]) -> None:
        """Start engines, keep them running, and run each workload on those that have it, in turn.

        Whoever begins changes with each repetition, so that nobody always follows the same other.
        """
        with ExitStack() as stack:
            drivers: dict[str, Driver] = {}
            for engine, start in starts.items():
                if engine in self.lost:
                    continue
                self._say(f"{engine}: starting")
                driver = stack.enter_context(start())
                if (name := self._unless_lost(engine, driver.ready)) is not None:
                    drivers[engine], self.names[engine] = driver, name
            for workload, engines in workloads.items():
                self._say(f"workload {workload}")
                for repetition in (WARM_UP, *range(self._repetitions)):
                    self._turn(workload, repetition, [drivers[engine] for engine in engines if engine in drivers])

    def _turn(self, workload: str, repetition: int, drivers: list[Driver]) -> None:
        shift = repetition % len(drivers) if drivers else 0
        for driver in drivers[shift:] + drivers[:shift]:
            if driver.name in self.lost:
                continue
            reply = self._unless_lost(driver.name, partial(driver.ask, workload, repetition, small=self._small))
            if reply is not None and repetition != WARM_UP:
                self.results.setdefault(driver.name, {}).setdefault(workload, []).append(reply)

    def _unless_lost(self, engine: str, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except EngineLost as error:
            self.lost[engine] = str(error)
            self._say(f"{engine}: lost: {error}")
            return None
