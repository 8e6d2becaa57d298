"""The swap manager: two lanes, out and in, that copy KV blocks between the device's pool and the host's.

Each lane is a thread with a queue, and runs its copies in the order in which they were sent. A copy waits in its
lane for the steps and the copies that it names; neither the other lane nor the worker waits with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from ...gpu.executor import Executor
from ...gpu.timelines import FencesClosedError
from ...protocol.errors import problem_of
from ...protocol.messages import CopyBlocks, CopyDirection, CopyDone
from ..observing.logs import logger
from .codec import LaneFailed
from .telling import tell

GOODBYE_S = 5.0
"""How long a copy that runs may take to end when its device is closed. They take milliseconds."""

OnCopyMessage = Callable[[CopyDone | LaneFailed], None]


LANE_NICENESS = 10
"""About a tenth of a core where there is none to spare."""


def give_way() -> None:
    """Let this thread run only while no compute thread wants its core: beside busy lanes a step is longer by 4% to 10%
    so, by 13% to 34% as an equal (Linux, where niceness is a thread's own).
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LANE_NICENESS)


class SwapManager:
    """Runs the copies of an open executor. Made on the event loop it reports to.

    `on_message` gets each `CopyDone` on that loop, or a `LaneFailed` after which that lane runs nothing any more.
    """

    def __init__(self, executor: Executor, on_message: OnCopyMessage) -> None:
        self._lanes = {direction: _Lane(direction, executor, on_message) for direction in ("out", "in")}

    def send(self, copy: CopyBlocks) -> None:
        """Queue a copy in its lane."""
        self._lanes[copy.direction].copies.put(copy)

    async def aclose(self) -> None:
        """Wait for the copies that run now, drop those behind them. Idempotent.

        The executor must have been interrupted: copies that wait for something do not end otherwise. A copy that is
        stuck all the same is left behind with its thread, which nothing can end.
        """
        for lane in self._lanes.values():
            lane.finish()
        await asyncio.gather(*(lane.ended() for lane in self._lanes.values()))


class _Lane:
    def __init__(self, direction: CopyDirection, executor: Executor, on_message: OnCopyMessage) -> None:
        self.copies: SimpleQueue[CopyBlocks | None] = SimpleQueue()
        self._direction = direction
        self._executor = executor
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name=f"repertory-copy-{direction}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """End after the copy that runs now."""
        with contextlib.suppress(Empty):  # the thread takes from it too
            while True:
                self.copies.get_nowait()
        self.copies.put(None)

    async def ended(self) -> None:
        """Wait for the end, for as long as it should take."""
        try:
            await asyncio.wait_for(self._ended.wait(), GOODBYE_S)
        except TimeoutError:
            logger("swap_manager").warning("lane.stuck", direction=self._direction, waited_s=GOODBYE_S)
        else:
            self._thread.join()  # it has nothing left to do

    # ---- on the lane's thread -------------------------------------------------------------------

    def _serve(self) -> None:
        give_way()
        while (copy := self.copies.get()) is not None:
            if not self._run(copy):
                break
        tell(self._loop, self._ended.set)

    def _run(self, copy: CopyBlocks) -> bool:
        try:
            message: CopyDone | LaneFailed = self._executor.copy_blocks(copy)
        except FencesClosedError:
            return False  # the device is being closed: nobody waits for an answer
        except BaseException as error:  # whatever it is: without an answer everybody would wait for ever
            message = LaneFailed(copy.epoch, copy.copy_id, copy.direction, problem_of(error))
        tell(self._loop, self._on_message, message)
        return isinstance(message, CopyDone)
