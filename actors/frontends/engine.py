"""The engine as a library: `async with Engine(model="demo") as engine: async for out in engine.generate(...)`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from tokenizers import Tokenizer as TextTokenizer

from ...gpu.executor import Capacity
from ...gpu.models.source import resolve_model
from ...protocol.config import EngineConfig, checked
from ...protocol.errors import (
    EngineDeadError,
    EngineDrainingError,
    QueueFullError,
    RepertoryError,
    UnsupportedError,
    ValidationError,
)
from ...protocol.ids import RequestId, request_ids, show_request_id
from ...protocol.messages import Abort, Admit, Credit, Submit, Tokenized
from ...protocol.outputs import BeamSearchOutput, EngineStats
from ...protocol.sampling import BeamSearchParams, SamplingParams, check_beams
from ..company import Company
from ..device import DeviceOpener, check_buildable
from ..devices.keeper import DeviceKeeper
from ..devices.making import device_maker
from ..devices.process import HOST_COMMAND
from ..observing.logs import configure_logging, logger
from ..observing.start import say_ready, say_start
from .beam_search import Search, run_search, sequences_of
from .stream import Delivery, RequestStream

SETTLE_S = 5.0
"""How long `audit` waits for steps and messages that are under way."""

RETRY_S = 0.01
"""How soon a full inbox is tried again."""

Resolved = tuple[Tokenized, Admit]

Prompt = str | list[int] | list[dict[str, Any]]


class Engine:
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
        self.config = checked(_configured(config, settings))
        check_buildable(self.config)
        self._open_device = open_device
        self._host_command = host_command
        self._new_id = request_ids()
        self._log = logger("engine")
        self._company: Company | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop: asyncio.Event | None = None
        self._death: RepertoryError | None = None

    # ---- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model and start the actors. Raises what kept them from starting."""
        if self._task is not None:
            raise RuntimeError("an Engine is started once; make a new one")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("repertory needs asyncio (trio has no running asyncio loop)") from None
        configure_logging(self.config.log_format, self.config.log_level, foreign=False)
        self._stop = asyncio.Event()
        ready: asyncio.Future[None] = loop.create_future()
        # The one bare task: the actors' task group lives in it, so that start and stop may be called from different
        # tasks and a crash inside never cancels the caller.
        self._task = asyncio.create_task(self._live(ready, self._stop), name="repertory-engine")
        try:
            await asyncio.shield(ready)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop. Requests that have not ended raise `EngineDeadError`. Idempotent."""
        if self._task is None or self._stop is None:
            return
        self._stop.set()
        while not self._task.done():
            # Not cancelled with the caller: threads and files are given back whatever happens here.
            await asyncio.wait([asyncio.shield(self._task)])

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

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
            self._company.dispatcher.fail_all(error)

    def _living(self) -> Company:
        if self._death is not None:
            raise EngineDeadError(str(self._death))
        if self._company is None:
            raise EngineDeadError("the engine has not been started: use `async with Engine(...) as engine`")
        return self._company

    # ---- requests -------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        trace_context: dict[str, str] | None = None,
    ) -> RequestStream:
        """Submit a request at once and return its stream of outputs.

        `prompt` is text, token ids, or chat messages. `request_id` is a label for logs and `abort`; it may
        repeat. `cache_salt` keeps its cached prefixes apart from everybody else's. A request that is wrong
        raises its `RequestError` when the stream is read.
        """
        company = self._living()
        if self._task is None or asyncio.get_running_loop() is not self._task.get_loop():
            raise RuntimeError("generate is called on the engine's own event loop: there it was started")
        submit = self._submission(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            trace_context=trace_context,
        )
        delivery = Delivery(submit)
        stream = self._stream(delivery)
        if company.scheduler.core.draining:
            delivery.fail(EngineDrainingError("the engine is draining and takes no new requests"))
        elif company.submissions.post_nowait(submit):
            company.dispatcher.add(delivery)
        else:
            delivery.fail(QueueFullError(f"{company.submissions.bound} requests are on their way already"))
        return stream

    def resolve_all(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Resolved]:
        """Validate and tokenize a whole list, starting nothing. Blocks: call it in a thread. Raises `RequestError`."""
        resolver = self._living().resolver
        return [resolver.resolve(self._submission(prompt, one, None)) for prompt, one in zip(prompts, params, strict=True)]

    def start_resolved(self, resolved: Resolved, *, params: SamplingParams) -> RequestStream:
        """Submit what `resolve_all` returned: its tokens go straight to the scheduler."""
        company = self._living()
        tokenized, admit = resolved
        submit = Submit(admit.request_id, admit.label, tokenized.prompt or tokenized.token_ids, params, time.monotonic())
        delivery = Delivery(submit)
        delivery.on_tokenized(tokenized)
        stream = self._stream(delivery)
        if company.scheduler.inbox.post_nowait(msgspec.structs.replace(admit, arrival_s=submit.arrival_s)):
            company.dispatcher.add(delivery)
        else:
            delivery.fail(QueueFullError(f"{company.scheduler.inbox.bound} requests are on their way already"))
        return stream

    async def beam_search(self, prompt: Prompt, params: BeamSearchParams, *, cache_salt: str | None = None) -> BeamSearchOutput:
        """The most likely continuations of a prompt (text, token ids, or chat messages); see `beam_search.py` for the rules.

        Raises `RequestError` where prompt or parameters are wrong. Cancelling it frees all it holds.
        """
        company = self._living()
        check_beams(params)
        if not company.scheduler.core.policy.admits_beside(1):
            policy = self.config.scheduling_policy
            raise UnsupportedError(f"scheduling_policy {policy!r} lets no beam follow another", field="scheduling_policy")
        started = time.monotonic()
        submit = self._submission(prompt, SamplingParams(max_tokens=params.max_tokens), None, cache_salt=cache_salt)
        tokenized, admit = await anyio.to_thread.run_sync(company.resolver.resolve, submit)
        prompt_ids = tokenized.token_ids
        room = company.scheduler.core.max_length - len(prompt_ids)
        ends = company.resolver.eos_token_ids
        search = Search(params, eos_token_ids=ends, max_tokens=min(params.max_tokens, room))

        def ask(token_ids: list[int], parent: RequestId | None, step: SamplingParams) -> RequestStream:
            part = msgspec.structs.replace(
                admit,
                request_id=self._new_id(),
                token_ids=prompt_ids + token_ids,
                params=step,
                stop_token_ids=[],
                holds=True,
                follows=parent,
            )
            return self.start_resolved((Tokenized(part.request_id, None, part.token_ids), part), params=step)

        found = await run_search(search, ask)
        # Decodes whole texts: not on the loop.
        sequences = await anyio.to_thread.run_sync(sequences_of, found, prompt_ids, search.eos_token_ids, self.tokenizer)
        self._log.info(
            "request.finished",
            request_id=show_request_id(submit.request_id),
            label=submit.label,
            finish_reason=sequences[0].finish_reason,
            e2e_s=round(time.monotonic() - started, 6),
            num_prompt_tokens=len(prompt_ids),
            num_output_tokens=sum(len(beam.token_ids) for beam in found),
            num_sequences=len(found),
        )
        return BeamSearchOutput(sequences)

    def _submission(self, prompt: Prompt, params: SamplingParams | None, label: str | None, **fields: Any) -> Submit:
        params = SamplingParams() if params is None else params
        if label is not None and not isinstance(label, str):
            raise ValidationError(f"request_id must be text, not {type(label).__name__}", field="request_id", value=label)
        if not isinstance(params, SamplingParams):
            raise ValidationError(
                f"sampling_params must be SamplingParams, not {type(params).__name__}", field="sampling_params"
            )
        request_id = self._new_id()
        return Submit(
            request_id=request_id,
            label=show_request_id(request_id) if label is None else label,
            prompt=prompt.copy() if isinstance(prompt, list) else prompt,  # read later: the caller may change its own
            params=params,
            arrival_s=time.monotonic(),
            **fields,
        )

    def _stream(self, delivery: Delivery) -> RequestStream:
        return RequestStream(delivery, self._abort_nowait, self._grant, credit_window=self.config.credit_window)

    def _grant(self, request_id: RequestId, num_tokens: int, index: int) -> None:
        """Tell the scheduler that a reader has taken tokens; if there is no room, again a little later."""
        if self._company is None or self._death is not None:
            return
        if not self._company.scheduler.inbox.post_nowait(Credit(request_id, num_tokens, index)):
            # Not left to the reader's next turn: it may wait for the very token that this credit is for.
            asyncio.get_running_loop().call_later(RETRY_S, self._grant, request_id, num_tokens, index)

    async def abort(self, request_id: str) -> None:
        """Abort the requests that have this label now. Unknown labels are a no-op; later requests are not touched."""
        if self._death is not None:
            return
        company = self._living()
        for found in company.dispatcher.labelled(request_id):
            await company.submissions.post(Abort(found))

    def _abort_nowait(self, request_id: RequestId) -> None:
        """Post an `Abort` from a place that cannot wait; if there is no room, again a little later."""
        if self._company is None or self._death is not None:
            return
        if not self._company.submissions.post_nowait(Abort(request_id)):
            asyncio.get_running_loop().call_later(RETRY_S, self._abort_nowait, request_id)

    # ---- facts and controls ---------------------------------------------------------------------

    @property
    def capacity(self) -> Capacity:
        """What the device offers."""
        return self._living().capacity

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may be chat messages."""
        return self._living().resolver.reader.supports_chat

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer (of the `tokenizers` library), to be shared and not changed."""
        return self._living().resolver.reader.tokenizer

    async def stats(self) -> EngineStats:
        """A consistent snapshot."""
        return self._living().scheduler.core.stats()

    async def audit(self) -> list[str]:
        """What does not add up in blocks, counts and tables; empty when all is well.

        When no request is live it first waits (5 s at most) for what is under way to settle.
        """
        company = self._living()
        if not company.scheduler.core.num_live:
            await company.settle(SETTLE_S)
        return company.audit()

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request holds."""
        self._living().scheduler.reset_cache()

    async def check_health(self) -> None:
        """Raise `EngineDeadError` unless the engine serves."""
        self._living()

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and wait for those that run; False when `timeout_s` seconds were not enough.

        Raises `EngineDeadError` when the engine stops meanwhile.
        """
        company = self._living()
        company.scheduler.drain()
        settled = await company.settle(float("inf") if timeout_s is None else timeout_s)
        self._living()
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


def first_of(error: BaseException) -> BaseException:
    """The exception behind the groups that task groups wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
