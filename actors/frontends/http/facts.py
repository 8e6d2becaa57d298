"""What can be asked about the server: whether it lives, whether it serves, and what."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import anyio

from ....protocol.config import shown
from ....protocol.errors import EngineDrainingError, RepertoryError, shorten
from ....protocol.version import __version__
from ..face import EngineFace
from .errors import HttpError
from .exchange import Exchange
from .sending import METRICS_TEXT, send_bytes, send_json

HEALTH_TIMEOUT_S = 5.0
"""An engine that has not said by then that it lives counts as dead."""


class Facts:
    """The endpoints that answer without generating. `model` is the name it is served by."""

    def __init__(self, engine: EngineFace, *, model: str, is_draining: Callable[[], bool]) -> None:
        self._engine = engine
        self._model = model
        self._is_draining = is_draining
        self._started = int(time.time())

    async def health(self, exchange: Exchange) -> None:
        """`GET /health`: 200 while the engine lives, draining or not, else 503."""
        await self._check_alive()
        await send_json(exchange.send, {"status": "ok"})

    async def ready(self, exchange: Exchange) -> None:
        """`GET /ready`: 200 while new requests are taken, else 503."""
        await self._check_alive()
        if self._is_draining():
            raise EngineDrainingError("the server is draining and takes no new requests")
        await send_json(exchange.send, {"status": "ready"})

    async def _check_alive(self) -> None:
        try:
            with anyio.fail_after(HEALTH_TIMEOUT_S):
                await self._engine.check_health()
        except TimeoutError:
            raise HttpError(503, f"the engine has said nothing for {HEALTH_TIMEOUT_S:g} s") from None

    async def metrics(self, exchange: Exchange) -> None:
        """`GET /metrics`: what a Prometheus scrapes, of the whole company, whichever frontend is asked."""
        text = await self._engine.metrics_text()
        await send_bytes(exchange.send, text, headers=[METRICS_TEXT])

    async def models(self, exchange: Exchange) -> None:
        """`GET /v1/models`: the one that is served."""
        await send_json(exchange.send, {"object": "list", "data": [self._model_card()]})

    async def one_model(self, exchange: Exchange) -> None:
        """`GET /v1/models/NAME`."""
        name = exchange.scope["path_params"]["name"]
        if name != self._model:
            raise HttpError(404, f"the model {shorten(name)} does not exist", param="model", code="model_not_found")
        await send_json(exchange.send, self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "repertory",
            "root": self._engine.config.model,
            "parent": None,
            "max_model_len": self._engine.capacity.max_model_len,
        }

    async def version(self, exchange: Exchange) -> None:
        """`GET /version`."""
        await send_json(exchange.send, {"version": __version__})

    async def model_info(self, exchange: Exchange) -> None:
        """`GET /model_info`: what routers ask for."""
        await send_json(exchange.send, self._model_info())

    async def server_info(self, exchange: Exchange) -> None:
        """`GET /server_info`: the same, the settings that differ from their defaults (no secrets), and the engine's numbers."""
        info = {**self._model_info(), "version": __version__, "config": shown(self._engine.config)}
        try:
            info["stats"] = await self._engine.stats()
        except RepertoryError as error:
            info["stats"], info["problem"] = None, str(error)
        await send_json(exchange.send, info)

    def _model_info(self) -> dict[str, Any]:
        capacity = self._engine.capacity
        return {
            "model_path": self._engine.config.model,
            "served_model_name": self._model,
            "is_generation": True,
            "has_chat_template": self._engine.prompt_reader.supports_chat,
            "max_model_len": capacity.max_model_len,
            "vocab_size": capacity.vocab_size,
        }
