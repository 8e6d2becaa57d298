"""The HTTP frontend as an ASGI application: who may ask what, and what becomes of an error.

Starlette's router finds the endpoint; everything an answer needs is in an `Exchange`. Whatever an endpoint raises ends here,
as an answer in OpenAI's shape or, in a stream that has begun, as its last event.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router

from ....protocol.errors import EngineDrainingError, RepertoryError
from ...observing.logs import logger
from ..face import EngineFace
from .bodies import ClientGone
from .errors import HttpError, as_http, bad_request, unforeseen
from .exchange import KEY, Exchange, exchange_of
from .facts import Facts
from .generating import Generating
from .presence import ReaderStuckError
from .sampling import model_defaults
from .sending import Receive, Scope, Send
from .tokens import Tokenizing

MAX_HEADER_BYTES = 16_384
"""Of one header, or of the path with its query."""
SAID_OF_PATH = 200
"""Characters of a path that answers and log lines repeat."""
SAID_OF_REASON = 400
"""Characters of an answer's message that its log line repeats: a chat template's own may be of any length."""

Handler = Callable[[Exchange], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN_PATHS = frozenset(("/health", "/ready", "/metrics", "/version", "/server_info", "/model_info"))
"""What answers without the key. Everything else asks for it, also where there is nothing: so a new path is never open."""


def make_app(engine: EngineFace, *, is_draining: Callable[[], bool] = lambda: False) -> Application:
    """The application that serves `engine`, which has been started, to HTTP clients.

    While `is_draining` says so new generations are refused with 503; what runs goes on. Raises `ConfigError` where the
    model's own sampling defaults are not allowed.
    """
    config = engine.config
    model = config.served_model_name or config.model
    defaults = model_defaults(engine.prompt_reader.model_dir, vocab_size=engine.capacity.vocab_size)
    generating = Generating(engine, model=model, defaults=defaults)
    tokenizing = Tokenizing(engine, model=model)
    facts = Facts(engine, model=model, is_draining=is_draining)
    drained = _Drained(is_draining)
    routes = [
        _route("POST", "/v1/completions", drained.unless(generating.complete)),
        _route("POST", "/v1/chat/completions", drained.unless(generating.chat)),
        _route("POST", "/tokenize", tokenizing.tokenize),
        _route("POST", "/detokenize", tokenizing.detokenize),
        _route("GET", "/v1/models", facts.models),
        _route("GET", "/v1/models/{name:path}", facts.one_model),
        _route("GET", "/health", facts.health),
        _route("GET", "/ready", facts.ready),
        _route("GET", "/metrics", facts.metrics),
        _route("GET", "/version", facts.version),
        _route("GET", "/server_info", facts.server_info),
        _route("GET", "/model_info", facts.model_info),
    ]
    return _Shell(Router(routes, redirect_slashes=False), api_key=config.api_key)


class _Drained:
    def __init__(self, is_draining: Callable[[], bool]) -> None:
        self._is_draining = is_draining

    def unless(self, handler: Handler) -> Handler:
        async def handle(exchange: Exchange) -> None:
            if self._is_draining():
                raise EngineDrainingError("the server is draining and takes no new requests")
            await handler(exchange)

        return handle


class _Endpoint:
    """A handler as the application that starlette's routes take."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(exchange_of(scope))


def _route(method: str, path: str, handler: Handler) -> Route:
    return Route(path, _Endpoint(handler), methods=[method])


class _Shell:
    """Round everything: limits and key before, errors after."""

    def __init__(self, router: Router, *, api_key: str | None) -> None:
        self._router = router
        self._key = None if api_key is None else api_key.encode()
        self._log = logger("http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        try:
            exchange = Exchange(scope, receive, send)
        except HttpError as error:
            await self._refuse(Exchange({**scope, "headers": []}, receive, send), error)
            return
        scope[KEY], scope["app"] = exchange, self
        try:
            self._check(exchange)
            await self._router(scope, receive, exchange.send)
        except ClientGone:
            self._log.info("http.disconnected", label=exchange.request_id, path=_path_of(scope))
        except ReaderStuckError:
            self._log.warning("http.reader_stuck", label=exchange.request_id, waited_s=round(exchange.waiting_s, 3))
            await exchange.hang_up()
        except HttpError as error:
            await self._refuse(exchange, error)
        except HTTPException as error:
            asked = f"{scope['method']} {_path_of(scope)}"
            await self._refuse(exchange, HttpError(error.status_code, f"{asked}: {error.detail}"))
        except RepertoryError as error:
            await self._refuse(exchange, as_http(error))
        except Exception as error:
            self._log.error("http.failed", label=exchange.request_id, path=_path_of(scope), reason=repr(error), exc_info=error)
            await exchange.fail(unforeseen(error))

    async def _refuse(self, exchange: Exchange, error: HttpError) -> None:
        self._log.info(
            "http.refused",
            label=exchange.request_id,
            path=_path_of(exchange.scope),
            status=error.status,
            reason=str(error)[:SAID_OF_REASON],
            field=error.param,
        )
        await exchange.fail(error)

    def _check(self, exchange: Exchange) -> None:
        scope = exchange.scope
        for name, value in scope["headers"]:
            if len(name) + len(value) > MAX_HEADER_BYTES:
                raise bad_request(f"a header may have at most {MAX_HEADER_BYTES} bytes", name[:80].decode("latin-1"))
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_HEADER_BYTES:
            raise bad_request(f"a path may have at most {MAX_HEADER_BYTES} bytes")
        if self._key is not None and scope["path"] not in _OPEN_PATHS:
            given = (exchange.header(b"authorization") or "").encode("latin-1")
            scheme, _, key = given.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                raise HttpError(401, "the API key is missing or wrong", code="invalid_api_key")


def _path_of(scope: Scope) -> str:
    return str(scope["path"])[:SAID_OF_PATH]
