"""A device host with faults: `python -m repertory.tests.supervision.faulty_host ENDPOINT`.

The file that FAULTY_HOST names is a `Plan`. Which life of the device this is, is counted in a file beside it, with the
process of each; a fault that happens once leaves a file there. So a test can say beforehand in which life and at which step
the host is to kill, stop or hang itself, or to raise.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Literal

import msgspec

from repertory.actors.device import open_executor
from repertory.actors.device_host import main
from repertory.gpu.executor import Executor, Watch
from repertory.protocol.capacity import Capacity
from repertory.protocol.config import EngineConfig
from repertory.protocol.ids import SequenceId
from repertory.protocol.messages import CopyBlocks, CopyDone, RunStep, StepDone

VARIABLE = "FAULTY_HOST"
COMMAND = (sys.executable, "-m", "repertory.tests.supervision.faulty_host")

How = Literal["kill", "stop", "raise", "panic", "exit", "hang", "babble", "starve"]
When = Literal["opening", "before", "during", "after", "copying"]


class Fault(msgspec.Struct, frozen=True):
    """What goes wrong, and when: in which life (None: any), from which step on, with which prompt token among its rows.

    "before" a step nothing of it is computed, "during" it a part is, "after" it all is and the answer is lost.
    "copying": before a copy, on its lane; `step` is then the copy's number.
    """

    how: How
    when: When = "before"
    life: int | None = None
    step: int = 1
    token: int | None = None
    is_last: bool = True
    """It happens once. False: whenever it can."""


class Plan(msgspec.Struct, frozen=True):
    """All the faults of one test, and how long each step takes at least."""

    faults: list[Fault]
    step_s: float = 0.0


class Panic(BaseException):
    """What no `except Exception` catches."""


class FaultyExecutor:
    """Implements `Executor`: another one, with faults."""

    def __init__(self, inner: Executor, history: History) -> None:
        self._inner = inner
        self._history = history
        self._prompts: dict[SequenceId, frozenset[int]] = {}

    @property
    def capacity(self) -> Capacity:
        """The inner one's."""
        return self._inner.capacity

    @property
    def num_sequences(self) -> int:
        """The inner one's."""
        return self._inner.num_sequences

    def run_step(self, step: RunStep) -> StepDone:
        """Run the step, or die of it."""
        for row in step.admitted:
            self._prompts[row.seq_id] = frozenset(row.token_ids[: row.num_prompt_tokens])
        tokens = frozenset().union(*(self._prompts[seq_id] for seq_id in step.seq_ids))
        time.sleep(self._history.plan.step_s)
        self._history.suffer("before", step.step_id, tokens)
        self._history.suffer("during", step.step_id, tokens)
        done = self._inner.run_step(step)
        self._history.suffer("after", step.step_id, tokens)
        return done

    def copy_blocks(self, copy: CopyBlocks) -> CopyDone:
        """Run the copy, or die of it."""
        self._history.suffer("copying", copy.copy_id, frozenset())
        return self._inner.copy_blocks(copy)

    @property
    def watch(self) -> Watch | None:
        """The inner one's."""
        return self._inner.watch

    def interrupt(self) -> None:
        """Interrupt the inner one."""
        self._inner.interrupt()

    def close(self) -> None:
        """Close the inner one."""
        self._inner.close()


class History:
    """What has happened so far, over all lives."""

    def __init__(self, file: Path) -> None:
        self.plan = msgspec.json.decode(file.read_bytes(), type=Plan)
        self._folder = file.parent
        with (self._folder / "lives").open("a") as lives:
            lives.write(f"{os.getpid()}\n")
        self.life = len((self._folder / "lives").read_text().splitlines())

    def suffer(self, when: When, step: int, tokens: frozenset[int]) -> None:
        """Whatever the plan has for this moment."""
        for number, fault in enumerate(self.plan.faults):
            is_now = fault.when == when and fault.life in (None, self.life) and step >= fault.step
            if is_now and (fault.token is None or fault.token in tokens) and self._claim(number, fault):
                happen(fault.how, soon=when == "during")

    def _claim(self, number: int, fault: Fault) -> bool:
        with (self._folder / "deeds").open("a") as deeds:
            mark = self._folder / f"fault-{number}"
            if fault.is_last and mark.exists():
                return False
            mark.touch()
            deeds.write(f"{number}\n")
            return True


def happen(how: How, *, soon: bool) -> None:
    """End this process in that way, now or in the middle of what comes next."""
    if soon and how in ("kill", "stop", "exit"):
        threading.Timer(0.001, happen, (how,), {"soon": False}).start()
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exit":
        os._exit(3)
    elif how == "hang":
        threading.Event().wait()
    elif how == "babble":
        sys.stderr.write("x" * 300_000 + "\n")
    elif how == "starve":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.getrlimit(resource.RLIMIT_AS)[1]))
        bytearray(1 << 30)  # raises: there is no memory to be had any more
    elif how == "panic":
        raise Panic("no exception")
    else:
        raise RuntimeError("the device is on fire")


def open_faulty(config: EngineConfig, model_dir: Path) -> FaultyExecutor:
    """What `config` names, with the faults of the plan."""
    history = History(Path(os.environ[VARIABLE]))
    history.suffer("opening", 1, frozenset())
    return FaultyExecutor(open_executor(config, model_dir), history)


if __name__ == "__main__":
    status = main(open_faulty)
    sys.stderr.flush()
    os._exit(status)
