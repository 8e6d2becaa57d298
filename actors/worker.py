"""The Worker in this process: a compute thread of its own beside the event loop.

Steps go to the thread through a plain queue and come back through `call_soon_threadsafe` (13 us a
round trip). The thread shares the GIL with the loop, and every call into the device takes it
again: with Python's default switch interval of 5 ms a busy loop can make a 42 ms step last
seconds. The interval is therefore lowered while the worker lives, and set back at its end.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from ..gpu.executor import Executor
from ..protocol.errors import problem_of
from ..protocol.messages import RunStep, StepDone, StepFailed
from .mailbox import Mailbox
from .scheduler import SchedulerInbox
from .switch_interval import switch_interval

RETRY_S = 0.001


class InlineWorker:
    """Runs an executor's steps, in order, on one thread of this process. Made on the event loop it reports to.

    After a `StepFailed` no step is run any more: the device's state is not to be trusted.
    """

    def __init__(self) -> None:
        self._steps: SimpleQueue[RunStep | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[Executor] = self._loop.create_future()
        self._closed = asyncio.Event()
        self._inbox: Mailbox[SchedulerInbox] | None = None
        self._undelivered: deque[StepDone | StepFailed] = deque()
        self._thread: threading.Thread | None = None

    async def start(self, open_executor: Callable[[], Executor]) -> Executor:
        """Open the device on the thread that will drive it; raises what opening raised."""
        switch_interval.lower()
        self._thread = threading.Thread(target=self._serve, args=(open_executor,), name="repertory-compute", daemon=True)
        self._thread.start()
        return await self._opened

    def report_to(self, inbox: Mailbox[SchedulerInbox]) -> None:
        """Where `StepDone` and `StepFailed` go."""
        self._inbox = inbox

    def send(self, step: RunStep) -> None:
        """Queue a step. Steps run one at a time, in this order."""
        self._steps.put(step)

    async def aclose(self) -> None:
        """Wait for the step that runs now, drop those behind it, close the device. Idempotent."""
        if self._thread is None:
            return
        while not self._steps.empty():
            self._steps.get_nowait()
        self._steps.put(None)
        await self._closed.wait()
        self._thread.join()  # it has nothing left to do
        self._thread = None
        switch_interval.restore()

    def _deliver(self, message: StepDone | StepFailed) -> None:
        self._undelivered.append(message)
        self._flush()

    def _flush(self) -> None:
        """A full inbox is emptied in the scheduler's next turn: nothing is lost, and the order is kept."""
        while self._undelivered and self._inbox is not None:
            if not self._inbox.post_nowait(self._undelivered[0]):
                self._loop.call_later(RETRY_S, self._flush)
                return
            self._undelivered.popleft()

    # ---- on the compute thread ------------------------------------------------------------------

    def _serve(self, open_executor: Callable[[], Executor]) -> None:
        try:
            executor = open_executor()
        except BaseException as error:
            self._tell(self._fail_opening, error)
            self._tell(self._closed.set)
            return
        self._tell(self._set_opened, executor)
        try:
            while (step := self._steps.get()) is not None:
                if not self._run(executor, step):
                    break
        finally:
            try:
                executor.close()
            finally:
                # A device that cannot be closed is reported by the thread's hook; whoever waits for the end goes on.
                self._tell(self._closed.set)

    def _run(self, executor: Executor, step: RunStep) -> bool:
        try:
            done: StepDone | StepFailed = executor.run_step(step)
        except Exception as error:
            done = StepFailed(step.epoch, step.step_id, problem_of(error))
        self._tell(self._deliver, done)
        return isinstance(done, StepDone)

    def _tell(self, call: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    # ---- back on the loop -----------------------------------------------------------------------

    def _set_opened(self, executor: Executor) -> None:
        if not self._opened.done():
            self._opened.set_result(executor)

    def _fail_opening(self, error: BaseException) -> None:
        if not self._opened.done():
            self._opened.set_exception(error)
