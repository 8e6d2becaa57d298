"""`repertory chat`: a conversation in the terminal.

Lines are read on the main thread, and the engine lives on a thread of its own: only the main thread's
reading can be ended by Ctrl-C with the terminal left as it was. Ctrl-C while a reply comes ends the
reply; at the prompt, and so a second time in a row, it ends the program.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TextIO

from anyio.from_thread import BlockingPortal, start_blocking_portal
from cyclopts import Group, Parameter

from ...protocol.config import EngineConfig
from ...protocol.config_sources import load_config
from ...protocol.errors import (
    NeverFitsError,
    RepertoryError,
    RequestError,
    RequestFailedError,
    UnsupportedError,
    ValidationError,
)
from ...protocol.outputs import EngineStats
from ..observing.logs import configure_logging
from .engine_flags import GROUPS, ConfigFile, engine_flags
from .generate import SamplingFlags, TextEngine, open_engine
from .reply import Reply

_CHAT = Group("Chat", sort_key=1)
_SAMPLING = Group("Sampling", sort_key=2)
_DEFAULTS = {"log_level": "warning"}
"""Log lines of a conversation that goes well would stand between the reader and the text."""
_PROMPT = "> "
_COMMANDS = "/reset forgets the conversation, /stats shows figures, /exit or Ctrl-D ends, Ctrl-C ends a reply"

if TYPE_CHECKING:
    EngineFlags = dict[str, Any]
else:
    EngineFlags = engine_flags(without=(*GROUPS["Serving"], "seed"), defaults=_DEFAULTS)

ReadLine = Callable[[], str | None]
"""Waits for the reader's next line; None when there are no more."""


class ChatEngine(TextEngine, Protocol):
    """What this verb needs of an engine."""

    async def stats(self) -> EngineStats:
        """A consistent snapshot."""
        ...


ChatEngineFactory = Callable[[EngineConfig], AbstractAsyncContextManager[ChatEngine]]


@dataclass(frozen=True)
class ReplyFlags(SamplingFlags):
    """How the tokens of replies are chosen."""

    max_tokens: Annotated[int, Parameter(help="tokens of a reply at most")] = 512


def chat(
    *,
    system: Annotated[str | None, Parameter(help="system message of the conversation", group=_CHAT)] = None,
    sampling: Annotated[ReplyFlags | None, Parameter(name="*", group=_SAMPLING)] = None,
    config: ConfigFile = None,
    engine: Annotated[EngineFlags | None, Parameter(name="*")] = None,
) -> int:
    """Talk to a model in the terminal.

    Each turn is answered with the whole conversation as its prompt; what was said before is in the prefix
    cache. Ctrl-C ends a reply, a second one the program. Where input is no terminal, each line is a turn.
    """
    settings = load_config(flags=engine or {}, file=config, defaults=_DEFAULTS)
    sampling = sampling or ReplyFlags()
    sampling.params("delta")
    configure_logging(settings.log_format, settings.log_level)
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    conversation = Conversation(sampling, system=system, on_terminal=on_terminal)
    return run(conversation, settings, factory=open_engine, read_line=_terminal_line if on_terminal else _piped_line)


def run(conversation: Conversation, settings: EngineConfig, *, factory: ChatEngineFactory, read_line: ReadLine) -> int:
    """Hold `conversation` on an engine from `factory`, from the main thread; return the exit status.

    Raises `KeyboardInterrupt` for Ctrl-C outside of a reply, and what the engine raises at its start or death.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        with start_blocking_portal("asyncio") as portal, portal.wrap_async_context_manager(factory(settings)) as engine:
            try:
                return conversation.hold(portal, engine, read_line)
            finally:
                # Closing takes a moment; an impatient third Ctrl-C must not stop it halfway.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """What has been said, and the loop that adds to it. A turn that is refused or fails is taken back.

    `err` tells why; the exit status does too, but only where nobody sits at a terminal to see it.
    """

    def __init__(
        self,
        sampling: SamplingFlags,
        *,
        system: str | None = None,
        on_terminal: bool = False,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = list(self._beginning)
        self._sampling = sampling
        self._on_terminal = on_terminal
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._status = 0
        self._figures = ""

    def hold(self, portal: BlockingPortal, engine: ChatEngine, read_line: ReadLine) -> int:
        """Talk until there are no more lines; return the exit status: 0, 1 if a turn failed inside, 2 if one was refused."""
        if not engine.has_chat_template:
            raise UnsupportedError("this model has no chat template: use `repertory generate --raw`", field="model")
        if self._on_terminal:
            self._say(f"{_COMMANDS}\n")
        try:
            while (line := read_line()) is not None:
                if line.strip() == "/exit":
                    return self._status
                self._turn(portal, engine, line.strip())
        except KeyboardInterrupt:
            self._leave_prompt()
            raise
        self._leave_prompt()
        return self._status

    def _turn(self, portal: BlockingPortal, engine: ChatEngine, line: str) -> None:
        match line:
            case "":
                pass
            case "/reset":
                self.messages = list(self._beginning)
            case "/stats":
                self._say(self._figures + _engine_figures(portal.call(engine.stats)))
            case _ if line.startswith("/") and len(line.split()) == 1:
                self._say(f"{_COMMANDS}\n")
            case _:
                self._answer(portal, engine, line)

    def _answer(self, portal: BlockingPortal, engine: ChatEngine, line: str) -> None:
        turn = [*self.messages, {"role": "user", "content": line}]
        reply = Reply(self._say)
        try:
            reply.hear(portal, lambda: engine.generate(turn, self._sampling.params("delta")))
        except (RequestError, RequestFailedError) as error:
            self._complain(error)
            return
        self._figures = reply.figures()
        if reply.text:  # else it was ended before its first word: as if nothing had been asked
            self.messages = [*turn, {"role": "assistant", "content": reply.text}]

    def _complain(self, error: RepertoryError) -> None:
        hint = " (/reset begins a new conversation)" if isinstance(error, NeverFitsError) and len(self.messages) > 1 else ""
        self._err.write(f"error: {' '.join(str(error).split())}{hint}\n")
        self._err.flush()
        if not self._on_terminal:
            self._status = 1 if isinstance(error, RequestFailedError) else self._status or 2

    def _leave_prompt(self) -> None:
        """What the shell writes next begins on a line of its own."""
        if self._on_terminal:
            self._say("\n")

    def _say(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _engine_figures(stats: EngineStats) -> str:
    blocks = stats.device_blocks
    asked = stats.prefix_cache_queries
    return (
        f"engine: {stats.num_steps} steps, {stats.num_computed_tokens} tokens computed, "
        f"{stats.prefix_cache_hits} of {asked} prompt tokens found in the cache, "
        f"{blocks.total - blocks.free} of {blocks.total} KV blocks in use, {stats.num_restarts} restarts\n"
    )


def _terminal_line() -> str | None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its line editing and history
    try:
        return _as_text(lambda: input(_PROMPT))
    except EOFError:
        return None


def _piped_line() -> str | None:
    return _as_text(sys.stdin.readline) or None


def _as_text(read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        raise ValidationError(f"standard input: not UTF-8 text (byte {error.start})", field="prompts") from None
