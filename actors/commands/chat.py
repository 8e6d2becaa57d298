"""`repertory chat`: a conversation in the terminal. Ctrl-C ends a reply, a second one the program."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import anyio
from cyclopts import Group, Parameter

from ...protocol.config import EngineConfig
from ...protocol.config_sources import load_config
from ...protocol.errors import RequestError, UnsupportedError
from ..observing.logs import configure_logging
from .engine_flags import GROUPS, ConfigFile, engine_flags
from .generate import EngineFactory, SamplingFlags, TextEngine, open_engine

_CHAT = Group("Chat", sort_key=1)
_SAMPLING = Group("Sampling", sort_key=2)
_DEFAULTS = {"log_level": "warning"}
_HELP = """/reset forgets the conversation, /stats shows the engine's figures, /exit or Ctrl-D ends it."""

if TYPE_CHECKING:
    EngineFlags = dict[str, Any]
else:
    EngineFlags = engine_flags(without=(*GROUPS["Serving"], "seed"), defaults=_DEFAULTS)

ReadLine = Callable[[str], str]


def chat(
    *,
    system: Annotated[str | None, Parameter(help="system message of the conversation", group=_CHAT)] = None,
    sampling: Annotated[SamplingFlags | None, Parameter(name="*", group=_SAMPLING)] = None,
    config: ConfigFile = None,
    engine: Annotated[EngineFlags | None, Parameter(name="*")] = None,
) -> int:
    """Talk to a model in the terminal.

    Each turn is answered with the whole conversation as its prompt; what was said before is in the prefix
    cache. Ctrl-C ends a reply that is too long, a second one in a row the program.
    """
    settings = load_config(flags=engine or {}, file=config, defaults=_DEFAULTS)
    sampling = sampling or SamplingFlags(max_tokens=512)
    sampling.params("delta")
    configure_logging(settings.log_format, settings.log_level)
    return anyio.run(Conversation(sampling, system=system).hold, settings)


class Conversation:
    """Messages so far, and the loop that adds to them. Streams and the line reader are injected by tests."""

    def __init__(
        self,
        sampling: SamplingFlags,
        *,
        system: str | None = None,
        factory: EngineFactory = open_engine,
        read_line: ReadLine = input,
        out: TextIO | None = None,
    ) -> None:
        self.sampling = sampling
        self.messages: list[dict[str, str]] = []
        self._system = system
        self._factory = factory
        self._read_line = read_line
        self._out = out or sys.stdout
        self._reply: asyncio.Task[None] | None = None
        self._reset()

    async def hold(self, settings: EngineConfig) -> int:
        """Talk until the reader ends it; return the exit status."""
        async with self._factory(settings) as engine:
            if not engine.has_chat_template:
                raise UnsupportedError("this model has no chat template: use `repertory generate --raw`", field="model")
            self._say(f"{_HELP}\n")
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
            try:
                while (line := await self._next_line()) is not None:
                    await self._turn(engine, line.strip())
            finally:
                asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        self._say("\n")
        return 0

    async def _next_line(self) -> str | None:
        # Reading a terminal cannot be cancelled: Ctrl-C at the prompt is the terminal's own end of the program.
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        try:
            return await anyio.to_thread.run_sync(self._read_line, "> ", abandon_on_cancel=True)
        except EOFError:
            return None
        finally:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)

    async def _turn(self, engine: TextEngine, line: str) -> None:
        match line:
            case "":
                return
            case "/reset":
                self._reset()
            case "/exit":
                raise EOFError
            case _:
                await self._answer(engine, line)

    async def _answer(self, engine: TextEngine, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        said: list[str] = []
        self._reply = asyncio.create_task(self._stream(engine, said))
        try:
            await self._reply
        except asyncio.CancelledError:
            self._say(" [ended]")
        except RequestError as error:
            self.messages.pop()
            self._say(f"[{error}]\n")
            return
        finally:
            self._reply = None
        self._say("\n")
        self.messages.append({"role": "assistant", "content": "".join(said)})

    async def _stream(self, engine: TextEngine, said: list[str]) -> None:
        async with aclosing(engine.generate(list(self.messages), self.sampling.params("delta"))) as stream:
            async for output in stream:
                said.append(output.outputs[0].text)
                self._say(output.outputs[0].text)

    def _interrupt(self) -> None:
        if self._reply is not None:
            self._reply.cancel()

    def _reset(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def _say(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
