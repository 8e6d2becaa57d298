"""The compute thread: one thread that opens an executor, drives it, and closes it.

A device that computes by itself (`LaunchingExecutor`) gets a second thread, which waits for the answers of the steps that
the first has launched, so that the next step is launched while one runs.

Steps go to the thread through a plain queue and come back through `call_soon_threadsafe` (13 us a
round trip). The thread shares the GIL with its event loop, and every call into the device takes it
again: with Python's default switch interval of 5 ms a busy loop can make a 42 ms step last
seconds. The interval is therefore lowered while the thread lives, and set back at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

import msgspec

from ...gpu.executor import Executor, LaunchingExecutor, PendingStep
from ...gpu.timelines import FencesClosedError
from ...protocol.errors import problem_of
from ...protocol.messages import RunStep, StepDone, StepFailed
from ..switch_interval import switch_interval
from .telling import tell


class ComputeThread:
    """Runs an executor's steps in order. Made on the event loop it reports to.

    `on_message` gets each `StepDone` on that loop, or a `StepFailed` after which no step is run any
    more: the device's state is not to be trusted.
    """

    def __init__(self, open_executor: Callable[[], Executor], on_message: Callable[[StepDone | StepFailed], None]) -> None:
        self._open_executor = open_executor
        self._on_message = on_message
        self._steps: SimpleQueue[RunStep | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[Executor] = self._loop.create_future()
        self._closed = asyncio.Event()
        self._thread: threading.Thread | None = None

    async def start(self) -> Executor:
        """Open the device on the thread that will drive it and close it; raises what opening raised."""
        switch_interval.lower()
        self._thread = threading.Thread(target=self._serve, name="repertory-compute", daemon=True)
        self._thread.start()
        return await self._opened

    def send(self, step: RunStep) -> None:
        """Queue a step. Steps run one at a time, in this order."""
        self._steps.put(step)

    def drop(self) -> None:
        """Forget the steps that have not begun."""
        with contextlib.suppress(Empty):  # the thread takes from it too
            while True:
                self._steps.get_nowait()

    async def aclose(self) -> None:
        """Wait for the step that runs now, drop those behind it, close the device. Idempotent.

        The executor must have been interrupted, and nobody else may be using it any more.
        """
        if self._thread is None:
            return
        self.drop()
        self._steps.put(None)
        await self._closed.wait()
        self._thread.join()  # it has nothing left to do
        self._thread = None
        switch_interval.restore()

    # ---- on the compute thread ------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            executor = self._open_executor()
        except BaseException as error:
            tell(self._loop, _settle_exception, self._opened, error)
            tell(self._loop, self._closed.set)
            return
        tell(self._loop, _settle_result, self._opened, executor)
        try:
            if isinstance(executor, LaunchingExecutor):
                self._launch_all(executor)
            else:
                self._run_all(executor)
        finally:
            try:
                executor.close()
            finally:
                # A device that cannot be closed is reported by the thread's hook; whoever waits for the end goes on.
                tell(self._loop, self._closed.set)

    def _run_all(self, executor: Executor) -> None:
        is_sound = True
        while (step := self._steps.get()) is not None:
            is_sound = is_sound and self._answer(executor, step, partial(executor.run_step, step))

    def _launch_all(self, executor: LaunchingExecutor) -> None:
        answers = _Answering(self, executor)
        break_off = False
        try:
            while (step := self._steps.get()) is not None:
                if break_off or not answers.is_sound:
                    continue
                try:
                    pending = executor.launch_step(step)
                except BaseException as error:  # it is answered behind the steps before it
                    answers.put(step, _Raised(error))
                    break_off = True
                else:
                    answers.put(step, pending)
        finally:
            answers.end()

    def _answer(self, executor: Executor, step: RunStep, wait: Callable[[], StepDone]) -> bool:
        """Tell what `wait` returns of a step, or raises. Returns whether the device is to be trusted any more."""
        try:
            done: StepDone | StepFailed = wait()
            done = msgspec.structs.replace(done, num_sequences=executor.num_sequences)
        except FencesClosedError:
            return False  # the device is being closed: nobody waits for an answer
        except BaseException as error:  # whatever it is: without an answer everybody would wait for ever
            done = StepFailed(step.epoch, step.step_id, problem_of(error))
        tell(self._loop, self._on_message, done)
        return isinstance(done, StepDone)


class _Raised:
    """A step that could not be launched. Implements `PendingStep`."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def result(self) -> StepDone:
        """Raise what launching raised."""
        raise self._error


class _Answering:
    """The thread that waits for launched steps, in their order."""

    def __init__(self, compute: ComputeThread, executor: Executor) -> None:
        self.is_sound = True
        """False once a step has failed: nothing that comes after it is launched or answered."""
        self._compute = compute
        self._executor = executor
        self._launched: SimpleQueue[tuple[RunStep, PendingStep] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="repertory-answers", daemon=True)
        self._thread.start()

    def put(self, step: RunStep, pending: PendingStep) -> None:
        """A step has been launched."""
        self._launched.put((step, pending))

    def end(self) -> None:
        """Wait until everything launched is answered."""
        self._launched.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (item := self._launched.get()) is not None:
            step, pending = item
            self.is_sound = self.is_sound and self._compute._answer(self._executor, step, pending.result)


def _settle_result(future: asyncio.Future[Executor], result: Executor) -> None:
    if not future.done():
        future.set_result(result)


def _settle_exception(future: asyncio.Future[Executor], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
