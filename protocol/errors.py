"""Everything that can go wrong, as one tree (HTTP status beside each leaf).

    RepertoryError
    |-- RequestError                  the caller's fault; the engine is unharmed
    |   |-- ValidationError           400  a field, its value, what is allowed
    |   |   |-- UnsupportedError      400  a parameter that is not built yet, by name
    |   |   `-- NeverFitsError        400  more tokens than the model or the KV pool can hold
    |   |-- ReaderTooSlowError        408  the reader took nothing for max_pause_s
    |   `-- QueueFullError            429  max_num_queued requests are waiting
    `-- EngineError                   ours
        |-- ConfigError               -    a configuration mistake stops the start and names the key
        |   `-- ModelLoadError        -    missing, empty, truncated or of an unsupported architecture
        |-- RequestFailedError        500  this request failed, alone
        |-- EngineDrainingError       503  the engine finishes what runs and takes nothing new
        `-- EngineDeadError           503  the engine has stopped; nothing more will come

Errors cross process borders as a `Problem`, which names the leaf; `problem_of` and
`error_from` convert. Both directions know every leaf, and a test keeps it so.
"""

from __future__ import annotations

from typing import Any

import msgspec


class RepertoryError(Exception):
    """Root of everything this library raises on purpose."""

    http_status = 500


class RequestError(RepertoryError):
    """The caller's fault. Raised to the one who asked; the engine goes on serving."""

    http_status = 400


class ValidationError(RequestError, ValueError):
    """A field has a value that is not allowed.

    `field` names the parameter, `value` is what was given (shortened for display).
    """

    def __init__(self, message: str, *, field: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.field = field
        self.value = value


class UnsupportedError(ValidationError):
    """A parameter this version does not implement. Refused by name, never ignored."""


class NeverFitsError(ValidationError):
    """The request needs more tokens than the model length or the whole KV pool offers."""


class ReaderTooSlowError(RequestError):
    """The request was paused because its reader fell behind, and the reader took nothing for `max_pause_s`."""

    http_status = 408


class QueueFullError(RequestError):
    """`max_num_queued` requests are waiting already. Try again later."""

    http_status = 429


class EngineError(RepertoryError):
    """Our fault."""


class ConfigError(EngineError, ValueError):
    """A configuration mistake; the message names the key. `repertory` exits with status 2."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class ModelLoadError(ConfigError):
    """The model cannot be loaded: path missing, file truncated, architecture unknown."""


class RequestFailedError(EngineError):
    """One request failed inside the engine; the others are not affected."""


class EngineDrainingError(EngineError):
    """The engine is finishing what runs and takes no new requests."""

    http_status = 503


class EngineDeadError(EngineError):
    """The engine has stopped. Every waiting iterator raises this."""

    http_status = 503


class Problem(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """An error in a message: the leaf's class name, its text, and the field where one is at fault."""

    kind: str
    message: str
    field: str | None = None


_LEAVES: dict[str, type[RepertoryError]] = {
    leaf.__name__: leaf
    for leaf in (
        ValidationError, UnsupportedError, NeverFitsError, ReaderTooSlowError, QueueFullError, ConfigError, ModelLoadError,
        RequestFailedError, EngineDrainingError, EngineDeadError,
    )
}  # fmt: skip


def problem_of(error: BaseException) -> Problem:
    """Describe `error` for a message. An exception from outside the tree becomes `RequestFailedError`."""
    kind = type(error).__name__
    if kind not in _LEAVES:
        return Problem("RequestFailedError", f"{kind}: {error}")
    field = getattr(error, "field", None) or getattr(error, "key", None)
    return Problem(kind, str(error), field)


def error_from(problem: Problem) -> RepertoryError:
    """The exception that `problem` describes."""
    leaf = _LEAVES.get(problem.kind, RequestFailedError)
    if issubclass(leaf, ValidationError):
        return leaf(problem.message, field=problem.field)
    if issubclass(leaf, ConfigError):
        return leaf(problem.message, key=problem.field)
    return leaf(problem.message)


def first_of(error: BaseException) -> BaseException:
    """The exception behind the groups that task groups wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def shorten(value: Any, limit: int = 80) -> str:
    """`repr(value)` cut to `limit` characters, without making the whole of a huge one."""
    if isinstance(value, (str, bytes)) and len(value) > limit:
        return f"{value[:limit]!r}... ({len(value)} long)"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (list, tuple, dict, set)) and len(value) > 16:
        return f"a {type(value).__name__} of {len(value)} items"
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
