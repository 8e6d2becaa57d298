"""A reply of the model in `repertory chat`: shown while it comes, ended by Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing

import anyio
from anyio.from_thread import BlockingPortal

from ...protocol.errors import RequestFailedError
from ...protocol.outputs import RequestOutput
from .generate import OutputStream


class Reply:
    """One reply: shown through `say` while it comes, and kept."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.text = ""
        self._say = say
        self._num_tokens = 0
        self._last: RequestOutput | None = None
        self._scope: anyio.CancelScope | None = None
        self._ended: anyio.Event | None = None

    def hear(self, portal: BlockingPortal, begin: Callable[[], OutputStream]) -> None:
        """Show the stream that `begin` starts on the engine's thread, to its end or to Ctrl-C.

        Raises how it was refused, or `RequestFailedError`; and `KeyboardInterrupt` for a second Ctrl-C.
        """
        ending = ""
        try:
            try:
                portal.call(self._stream, begin)
            except KeyboardInterrupt:
                portal.call(self._stop)
                ending = " [ended]"
            if self._last is not None and self._last.outputs[0].finish_reason == "length":
                ending = " [cut off]"
        finally:
            if ending or (self.text and not self.text.endswith("\n")):
                self._say(f"{ending}\n")

    def figures(self) -> str:
        """Sizes and times of the reply, as a line; empty where none came."""
        if self._last is None:
            return ""
        prompt, cached = len(self._last.prompt_token_ids), self._last.num_cached_tokens
        line = f"last reply: {self._num_tokens} tokens to a prompt of {prompt} ({cached} of them cached)"
        times = self._last.metrics
        if times is not None and times.first_token is not None and times.last_token is not None:
            line += f", the first after {times.first_token - times.arrival:.2f} s"
            if times.last_token > times.first_token:
                line += f", then {(self._num_tokens - 1) / (times.last_token - times.first_token):.1f} a second"
        return line + "\n"

    async def _stream(self, begin: Callable[[], OutputStream]) -> None:
        self._ended = anyio.Event()
        try:
            with anyio.CancelScope() as self._scope:
                async with aclosing(begin()) as stream:
                    async for output in stream:
                        self._take(output)
        finally:
            self._ended.set()

    def _take(self, output: RequestOutput) -> None:
        completion = output.outputs[0]
        self._last = output
        self._num_tokens += len(completion.token_ids)
        self.text += completion.text
        self._say(completion.text)
        if completion.finish_reason == "error":
            raise RequestFailedError(str(completion.stop_reason))

    async def _stop(self) -> None:
        if self._scope is not None and self._ended is not None:  # else Ctrl-C came before anything began
            self._scope.cancel()
            await self._ended.wait()
