"""Structured logs: JSON lines for machines, a console for people, on stderr; stdout is the program's output.

structlog's configuration is the process's. A program (the command line) sets it up once, here; an
application that embeds the engine and has configured structlog keeps its own, and ours go there.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from ...protocol.config import LogFormat, LogLevel

_encoder = msgspec.json.Encoder(enc_hook=repr)


def configure_logging(format: LogFormat, level: LogLevel, stream: TextIO | None = None, *, foreign: bool = True) -> bool:
    """Set structlog up; return whether this call did so. No-op where it is configured already, by whomever.

    `format` auto is a console where `stream` (default: stderr) is a terminal and JSON elsewhere.
    `foreign` also sends other libraries' stdlib logging, from warnings upwards, through the same
    pipe, unless the root logger has handlers. An engine inside an application passes False: the
    root logger is the application's.
    """
    if structlog.is_configured():
        return False
    stream = stream or sys.stderr
    as_console = format == "console" or (format == "auto" and stream.isatty())
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, *_stamps(), *_rendering(as_console, colors=stream.isatty())],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    if foreign and not root.handlers:
        root.addHandler(_foreign_handler(stream, _rendering(as_console, colors=stream.isatty())))
    return True


def logger(actor: str) -> FilteringBoundLogger:
    """A logger whose lines carry `actor`. Bind a request with `.bind(request_id=...)`."""
    bound: FilteringBoundLogger = structlog.get_logger(actor=actor)
    return bound


def _stamps() -> list[Processor]:
    return [structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True), _monotonic]


def _monotonic(_logger: Any, _method: str, event: EventDict) -> EventDict:
    event["monotonic_s"] = round(time.monotonic(), 6)
    return event


def _rendering(as_console: bool, *, colors: bool) -> list[Processor]:
    # Neither form shows local variables of a traceback: they hold prompts and keys.
    if as_console:
        return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]
    transform = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(transform), structlog.processors.JSONRenderer(serializer=_to_json)]


def _to_json(event: EventDict, **_: Any) -> str:
    try:
        return _encoder.encode(event).decode()
    except (UnicodeEncodeError, TypeError, ValueError, OverflowError):
        # Half a surrogate pair in somebody's label, or an odd key: a log line must not fail a request.
        return json.dumps({str(key): value for key, value in event.items()}, default=repr, skipkeys=True)


def _foreign_handler(stream: TextIO, rendering: list[Processor]) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *_stamps()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    return handler
