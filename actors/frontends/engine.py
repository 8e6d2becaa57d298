"""The engine as a library: `async with Engine(model="demo") as engine: async for out in engine.generate(...)`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread

from ...gpu.models.source import resolve_model
from ...protocol.config import EngineConfig, checked
from ...protocol.errors import EngineDeadError, RepertoryError, first_of
from ...protocol.metrics import CoreMetrics
from ...protocol.outputs import EngineStats
from ..company import Company
from ..device import DeviceOpener, check_buildable, on_this_machine
from ..devices.keeper import DeviceKeeper
from ..devices.making import device_maker
from ..devices.process import HOST_COMMAND
from ..frontend_half import FrontendHalf
from ..observing.logs import configure_logging
from ..observing.start import say_ready, say_start
from .face import EngineFace

SETTLE_S = 5.0
"""How long `audit` waits for steps and messages that are under way."""


class Engine(EngineFace):
    """An inference engine in this process: its actors share the running asyncio loop.

    `Engine(EngineConfig(...))` and `Engine(model=..., ...)` are the same. Start and stop it with
    `async with`, or `start` and `aclose`, from any task. Raises `ConfigError` (at once, or from `start`)
    for a setting that is wrong, `ModelLoadError` for a model that cannot be loaded. `open_device` brings a
    device of one's own instead of the one that `config.device` names.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        open_device: DeviceOpener | None = None,
        host_command: Sequence[str] = HOST_COMMAND,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.config = on_this_machine(checked(_configured(config, settings)))
        check_buildable(self.config)
        self._open_device = open_device
        self._host_command = host_command
        self._company: Company | None = None
        self._death: RepertoryError | None = None

    # ---- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model and start the actors. Raises what kept them from starting."""
        configure_logging(self.config.log_format, self.config.log_level, foreign=False)
        await super().start()

    async def _live(self, ready: asyncio.Future[None], stop: asyncio.Event) -> None:
        started = time.monotonic()
        try:
            async with self._opened(started) as company:
                opened = time.monotonic()
                ready.set_result(None)
                await _until(stop, company)
                self._log.info("engine.stop", seconds=round(time.monotonic() - opened, 3))
            self._die(EngineDeadError("the engine has been closed"))
        except asyncio.CancelledError:
            # Somebody cancels every task of the loop, as `asyncio.run` does at its end: still nobody waits for ever.
            self._die(EngineDeadError("the engine's task was cancelled"))
            raise
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise  # the loop itself ends
        except BaseException as error:
            # Not only what is an `Exception`: a panic of Rust code is none, and still nobody may wait for ever.
            failure = first_of(error)
            if not ready.done():
                self._death = EngineDeadError(f"the engine did not start: {failure}")
                ready.set_exception(failure)
            else:
                self._log.error("engine.dead", reason=str(failure), exc_info=failure)
                self._die(
                    failure if isinstance(failure, EngineDeadError) else EngineDeadError(f"the engine has died: {failure!r}")
                )

    @asynccontextmanager
    async def _opened(self, started: float) -> AsyncIterator[Company]:
        model_dir = await anyio.to_thread.run_sync(self._find_model)
        maker = device_maker(self.config, model_dir, open_device=self._open_device, host_command=self._host_command)
        keeper = DeviceKeeper(maker, self.config)
        try:
            company = await Company.open(self.config, model_dir, keeper)
            say_start(self._log, self.config, company.capacity)
            self._company = company
            say_ready(self._log, time.monotonic() - started)
            yield company
        finally:
            await keeper.aclose()
            if self._company is not None:
                self._company.close()

    def _find_model(self) -> Any:
        return resolve_model(self.config.model, progress=lambda text: self._log.info("model.progress", message=text))

    def _die(self, error: EngineDeadError) -> None:
        self._death = error
        if self._company is not None:
            self._company.frontend.fail_all(error)

    def _living(self) -> FrontendHalf:
        return self._running().frontend

    def _running(self) -> Company:
        if self._death is not None:
            raise EngineDeadError(str(self._death))
        if self._company is None:
            raise EngineDeadError("the engine has not been started: use `async with Engine(...) as engine`")
        return self._company

    # ---- facts and controls ---------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because the engine finishes what runs."""
        return self._company is not None and self._company.scheduler.core.draining

    @property
    def _has_stopped(self) -> bool:
        return self._death is not None

    async def stats(self) -> EngineStats:
        """A consistent snapshot."""
        return self._running().scheduler.core.stats()

    async def metrics(self) -> CoreMetrics:
        """All that is counted."""
        return self._running().core.metrics()

    async def audit(self) -> list[str]:
        """What does not add up in blocks, counts and tables; empty when all is well.

        When no request is live it first waits (5 s at most) for what is under way to settle.
        """
        company = self._running()
        if not company.scheduler.core.num_live:
            await company.settle(SETTLE_S)
        return company.audit()

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request holds."""
        self._running().scheduler.reset_cache()

    async def check_health(self) -> None:
        """Raise `EngineDeadError` unless the engine serves."""
        self._running()

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and wait for those that run; False when `timeout_s` seconds were not enough.

        Raises `EngineDeadError` when the engine stops meanwhile.
        """
        company = self._running()
        company.scheduler.drain()
        settled = await company.settle(float("inf") if timeout_s is None else timeout_s)
        self._running()
        return settled


def _configured(config: EngineConfig | None, settings: dict[str, Any]) -> EngineConfig:
    if config is None:
        return EngineConfig(**settings)
    if settings:
        raise TypeError("give an EngineConfig or its fields, not both")
    return config


async def _until(stop: asyncio.Event, company: Company) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(company.run)
        await stop.wait()
        group.cancel_scope.cancel()
