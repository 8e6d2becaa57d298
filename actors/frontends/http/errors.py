"""Errors as OpenAI's clients read them: a status and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import msgspec

from ....protocol.errors import EngineDeadError, EngineDrainingError, NeverFitsError, QueueFullError, RepertoryError, problem_of

RETRY_AFTER_S = 1
"""When a client that was turned away for want of room should come again."""


class ErrorBody(msgspec.Struct):
    """What went wrong. `code` is OpenAI's word where it has one, else the HTTP status."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorAnswer(msgspec.Struct):
    """The body of every answer that is no success."""

    error: ErrorBody


class HttpError(Exception):
    """An answer with `status` instead of what was asked for."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> ErrorAnswer:
        """The answer's body."""
        return ErrorAnswer(ErrorBody(str(self), _kind_of(self.status), self.param, self.code or self.status))


def as_http(error: RepertoryError) -> HttpError:
    """An error of the engine as an answer. What is our fault is not told in more words than the engine's own."""
    param = getattr(error, "field", None)
    code: str | None = None
    retry_after_s: int | None = None
    if isinstance(error, NeverFitsError):
        code = "context_length_exceeded"
    elif isinstance(error, QueueFullError):
        code, retry_after_s = "rate_limit_exceeded", RETRY_AFTER_S
    elif isinstance(error, (EngineDrainingError, EngineDeadError)):
        retry_after_s = RETRY_AFTER_S
    return HttpError(error.http_status, str(error), param=param, code=code, retry_after_s=retry_after_s)


def unforeseen(error: BaseException) -> HttpError:
    """A mistake of ours, in the words the engine has for one; its traceback is in the log only."""
    return HttpError(500, problem_of(error).message)


def bad_request(message: str, param: str | None = None, *, code: str | None = None) -> HttpError:
    """A 400 that names the field at fault."""
    return HttpError(400, message, param=param, code=code)


def _kind_of(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 404:
            return "not_found_error"
        case 408:
            return "timeout_error"
        case 429:
            return "rate_limit_error"
        case 503:
            return "service_unavailable_error"
        case _:
            return "server_error" if status >= 500 else "invalid_request_error"
