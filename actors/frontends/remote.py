"""An engine whose core is another process: `async with connect("ipc:///...") as engine`.

Tokenizer, Detokenizer and streams are here, in a `FrontendHalf` for each life of the core; its mailbox to the core is
emptied into a link. When the core goes, every stream raises `EngineDeadError`, and so does all else until there is
another core at the endpoint: then a new half takes over, with a new incarnation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from ...gpu.models.config import load_model_config
from ...protocol.config import EngineConfig
from ...protocol.errors import ConfigError, EngineDeadError, first_of
from ...protocol.ids import new_incarnation
from ...protocol.link import (
    AuditAnswer,
    AuditAsked,
    Done,
    DrainAsked,
    MetricsAnswer,
    MetricsAsked,
    ResetAsked,
    StatsAnswer,
    StatsAsked,
    Welcome,
)
from ...protocol.metrics import CoreMetrics
from ...protocol.outputs import EngineStats
from ..core_half import SETTLE_POLL_S, left_over, mailbox_bound, settled
from ..frontend_half import FrontendHalf
from ..links.controls import SETTLE_S
from ..links.frontend_link import ANSWER_S, FrontendLink
from ..loop_lag import watch_loop
from ..mailbox import Mailbox
from ..observing.loads import load_of
from ..observing.logs import configure_logging
from ..resolving import Resolver, read_prompts_for, resolver_for
from ..scheduler import SchedulerInbox
from ..text.prompts import PromptReader
from .face import EngineFace

CONNECT_S = 30.0
"""How long `connect` waits for a core unless it is told otherwise."""
GREETING_S = 5.0
"""A core that has not answered by then may have died with our greeting: it is said again, on a new socket."""
RETRY_S = 0.05
LAG_HINT = "something blocks this frontend's loop: its own clients wait; more frontends share the work (--frontends)"


def connect(endpoint: str, *, timeout_s: float | None = CONNECT_S, config: EngineConfig | None = None) -> RemoteEngine:
    """An engine that is served by the core at `endpoint` (`ipc://PATH`), to be used as `async with connect(...) as engine`.

    Raises on entry `EngineDeadError` when no core answers for `timeout_s` seconds (None: it waits for ever), `ConfigError`
    where the model's tokenizer cannot be read here. `config` is used instead of the core's, which comes without secrets.
    """
    return RemoteEngine(endpoint, timeout_s=timeout_s, config=config)


class RemoteEngine(EngineFace):
    """The API of `Engine`, over a link. See `connect`."""

    def __init__(self, endpoint: str, *, timeout_s: float | None = CONNECT_S, config: EngineConfig | None = None) -> None:
        super().__init__()
        if not endpoint.startswith("ipc://"):
            raise ConfigError(f"endpoint {endpoint!r} is not ipc://PATH", key="endpoint")
        self.endpoint = endpoint
        self._given_config = config
        if config is not None:
            self.config = config
        self._timeout_s = timeout_s
        self._half: FrontendHalf | None = None
        self._link: FrontendLink | None = None
        self._absence = EngineDeadError("the engine has not been started: use `async with connect(...) as engine`")
        self._is_draining = False
        self._reader: tuple[str, PromptReader] | None = None

    # ---- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect. Raises `EngineDeadError` when no core answers in time."""
        given = self._given_config
        configure_logging(given.log_format if given else "auto", given.log_level if given else "info", foreign=False)
        await super().start()

    async def _live(self, ready: asyncio.Future[None], stop: asyncio.Event) -> None:
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._serve_cores, ready)
                await stop.wait()
                group.cancel_scope.cancel()
            self._leave(EngineDeadError("the engine has been closed"))
        except asyncio.CancelledError:
            self._leave(EngineDeadError("the engine's task was cancelled"))
            raise
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise  # the loop itself ends
        except BaseException as error:
            # Not only what is an `Exception`: a panic of Rust code is none, and still nobody may wait for ever.
            failure = first_of(error)
            if ready.done():
                self._log.error("engine.dead", reason=str(failure), exc_info=failure)
                self._leave(EngineDeadError(f"the frontend has died: {failure!r}"))
            else:
                self._leave(EngineDeadError(f"the engine did not start: {failure}"))
                ready.set_exception(failure)

    async def _serve_cores(self, ready: asyncio.Future[None]) -> None:
        """One core after another."""
        while True:
            async with self._linked(None if ready.done() else self._timeout_s) as (link, welcome):
                half = await self._new_half(link, welcome)
                error = EngineDeadError("the engine has been closed")
                try:
                    reason = await self._serve(half, link, ready)
                    error = EngineDeadError(f"the core is lost: {reason}")
                    self._log.error("core.lost", reason=reason, num_requests=len(half.dispatcher))
                except Exception as failure:
                    error = EngineDeadError(f"the frontend has died: {first_of(failure)!r}")
                    raise
                finally:
                    self._leave(error)
                    half.close()
                    half.core.close()
            await anyio.sleep(RETRY_S)

    async def _serve(self, half: FrontendHalf, link: FrontendLink, ready: asyncio.Future[None]) -> str:
        """Serve with this half until its core is lost; returns why."""
        async with anyio.create_task_group() as group:
            group.start_soon(half.run)
            group.start_soon(watch_loop, LAG_HINT)
            self._half, self._link = half, link
            self._log.info("core.connected", endpoint=self.endpoint)
            if not ready.done():
                ready.set_result(None)
            link.actor_loads = lambda: [*half.actor_loads(), load_of(half.core)]
            reason = await link.run(half.core, half.samples)
            await self._hear_out(half)
            group.cancel_scope.cancel()
        return reason

    async def _hear_out(self, half: FrontendHalf) -> None:
        """What has come before the core went is still handed over: a stream raises after its tokens."""
        with anyio.move_on_after(RETRY_S):
            while half.has_mail:  # noqa: ASYNC110 - a fact about mailboxes
                await anyio.sleep(SETTLE_POLL_S)

    @asynccontextmanager
    async def _linked(self, timeout_s: float | None) -> AsyncIterator[tuple[FrontendLink, Welcome]]:
        """A link to a core that has welcomed us, and is closed at the end."""
        until = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        refusal = ""
        while True:
            link = FrontendLink(self.endpoint, new_incarnation())
            welcome: Welcome | None = None
            try:
                with anyio.move_on_after(min(GREETING_S, until - time.monotonic())):
                    try:
                        welcome = await link.greet()
                    except EngineDeadError as error:
                        self._absence = error
                        refusal = f"; the last one said: {error}"
                        await anyio.sleep(RETRY_S)
                if welcome is not None:
                    yield link, welcome
                    return
            finally:
                await _closed(link)
            if time.monotonic() >= until:
                raise EngineDeadError(f"no core answers at {self.endpoint}: waited {timeout_s:g} s{refusal}")

    async def _new_half(self, link: FrontendLink, welcome: Welcome) -> FrontendHalf:
        config = self.config = self._given_config or welcome.config
        resolver = await anyio.to_thread.run_sync(self._read, config, welcome)
        bound = mailbox_bound(config)
        core: Mailbox[SchedulerInbox] = Mailbox("link", bound)
        return FrontendHalf(resolver, core, bound=bound, incarnation=link.incarnation)

    def _read(self, config: EngineConfig, welcome: Welcome) -> Resolver:
        model_dir = Path(welcome.model_dir)
        model = load_model_config(model_dir)
        if self._reader is None or self._reader[0] != welcome.model_dir:
            self._reader = welcome.model_dir, read_prompts_for(config, model_dir, model)
        return resolver_for(self._reader[1], config, welcome.capacity, model)

    def _leave(self, error: EngineDeadError) -> None:
        half, self._half, self._link = self._half, None, None
        self._absence = error
        if half is not None:
            half.fail_all(error)

    def _living(self) -> FrontendHalf:
        return self._connection()[0]

    def _connection(self) -> tuple[FrontendHalf, FrontendLink]:
        if self._half is None or self._link is None:
            raise EngineDeadError(str(self._absence))
        return self._half, self._link

    # ---- facts and controls ---------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because the engine finishes what runs."""
        return self._is_draining

    @property
    def _has_stopped(self) -> bool:
        return self._half is None and self._task is not None

    async def stats(self) -> EngineStats:
        """A consistent snapshot of the core, which other frontends share. Raises `EngineDeadError` where none answers."""
        _, link = self._connection()
        answer = await link.ask(StatsAsked)
        assert isinstance(answer, StatsAnswer)
        return answer.stats

    async def metrics(self) -> CoreMetrics:
        """All that the core counts, of all frontends. Raises `EngineDeadError` where none answers."""
        _, link = self._connection()
        answer = await link.ask(MetricsAsked)
        assert isinstance(answer, MetricsAnswer)
        return answer.metrics

    async def audit(self) -> list[str]:
        """What does not add up in the core or in this process; empty when all is well.

        When no request is live it first waits (5 s at most) for what is under way to settle.
        """
        half, link = self._connection()
        if not len(half.dispatcher):
            await settled(half, lambda: half.is_deserted, SETTLE_S)
        answer = await link.ask(AuditAsked)
        assert isinstance(answer, AuditAnswer)
        return answer.problems + ([] if len(half.dispatcher) else left_over(half.tables()))

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request holds."""
        _, link = self._connection()
        await link.ask(ResetAsked)

    async def check_health(self) -> None:
        """Raise `EngineDeadError` unless the core's loop has been heard of lately (`heartbeat_timeout_s`)."""
        _, link = self._connection()
        link.check()

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests, everybody's, and wait for those that run; False when `timeout_s` seconds were not enough.

        Raises `EngineDeadError` when the core is lost meanwhile.
        """
        half, link = self._connection()
        self._is_draining = True
        until = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        limit_s = None if timeout_s is None else timeout_s + ANSWER_S
        answer = await link.ask(lambda number: DrainAsked(number, timeout_s), timeout_s=limit_s)
        assert isinstance(answer, Done)
        is_idle = await settled(half, lambda: half.is_deserted, max(0.0, until - time.monotonic()))
        return answer.ok and is_idle


async def _closed(link: FrontendLink) -> None:
    with anyio.CancelScope(shield=True):
        await link.aclose()
