"""What every engine offers, wherever its core is: one class, so that an embedded engine and a connected one cannot differ.

A subclass says which `FrontendHalf` serves now (`_living`), how it lives (`_live`), and asks its core what only that knows:
`stats`, `audit`, `reset_prefix_cache`, `check_health`, `drain`.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
import msgspec
from tokenizers import Tokenizer as TextTokenizer

from ...protocol.capacity import Capacity
from ...protocol.config import EngineConfig
from ...protocol.conversation import Conversation
from ...protocol.errors import EngineDrainingError, QueueFullError, UnsupportedError, ValidationError
from ...protocol.ids import RequestId, show_request_id
from ...protocol.messages import Abort, Admit, Submit, Tokenized
from ...protocol.metrics import CoreMetrics
from ...protocol.outputs import BeamSearchOutput, EngineStats
from ...protocol.sampling import BeamSearchParams, SamplingParams, check_beams
from ..frontend_half import FrontendHalf
from ..observing import tracing
from ..observing.logs import logger
from ..scheduling.limits import longest_sequence
from ..scheduling.policies import load_policy
from ..text.prompts import PromptReader
from .beam_search import Search, run_search, sequences_of
from .stream import Delivery, RequestStream

Resolved = tuple[Tokenized, Admit]

Prompt = str | list[int] | list[dict[str, Any]] | Conversation


class EngineFace(ABC):
    """The API of an engine. Start and stop it with `async with`, or `start` and `aclose`, from any task."""

    config: EngineConfig

    def __init__(self) -> None:
        self._log = logger("engine")
        self._task: asyncio.Task[None] | None = None
        self._stop: asyncio.Event | None = None

    # ---- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to serve. Raises what kept it from that."""
        if self._task is not None:
            raise RuntimeError("an Engine is started once; make a new one")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("repertory needs asyncio (trio has no running asyncio loop)") from None
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

    async def ended(self) -> None:
        """Wait until it serves no more, and never will again: closed, or dead."""
        assert self._task is not None, "it has not been started"
        await asyncio.wait([asyncio.shield(self._task)])

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @abstractmethod
    async def _live(self, ready: asyncio.Future[None], stop: asyncio.Event) -> None:
        """Serve until `stop`. `ready` is told when it can, or what kept it from that."""

    @abstractmethod
    def _living(self) -> FrontendHalf:
        """The half that serves now. Raises `EngineDeadError` where there is none."""

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
        repeat. `cache_salt` keeps its cached prefixes apart from everybody else's. `trace_context` holds the W3C headers
        (`traceparent`, `tracestate`) of the caller's trace. A request that is wrong raises its `RequestError` when the
        stream is read.
        """
        half = self._living()
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
        delivery = self._traced(submit)
        stream = self._stream(delivery, half)
        if self.is_draining:
            delivery.fail(EngineDrainingError("the engine is draining and takes no new requests"))
        elif half.submissions.post_nowait(submit):
            half.dispatcher.add(delivery)
        else:
            delivery.fail(QueueFullError(f"{half.submissions.bound} requests are on their way already"))
        return stream

    def resolve_all(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Resolved]:
        """Validate and tokenize a whole list, starting nothing. Blocks: call it in a thread. Raises `RequestError`."""
        resolver = self._living().resolver
        return [resolver.resolve(self._submission(prompt, one, None)) for prompt, one in zip(prompts, params, strict=True)]

    def start_resolved(self, resolved: Resolved, *, params: SamplingParams) -> RequestStream:
        """Submit what `resolve_all` returned: its tokens go straight to the scheduler."""
        half = self._living()
        tokenized, admit = resolved
        submit = Submit(admit.request_id, admit.label, tokenized.prompt or tokenized.token_ids, params, time.monotonic())
        delivery = Delivery(submit) if admit.holds else self._traced(submit)
        delivery.on_tokenized(tokenized)
        stream = self._stream(delivery, half)
        if half.core.post_nowait(msgspec.structs.replace(admit, arrival_s=submit.arrival_s)):
            half.dispatcher.add(delivery)
        else:
            delivery.fail(QueueFullError(f"{half.core.bound} requests are on their way already"))
        return stream

    async def beam_search(self, prompt: Prompt, params: BeamSearchParams, *, cache_salt: str | None = None) -> BeamSearchOutput:
        """The most likely continuations of a prompt (text, token ids, or chat messages); see `beam_search.py` for the rules.

        Raises `RequestError` where prompt or parameters are wrong. Cancelling it frees all it holds.
        """
        half = self._living()
        check_beams(params)
        if not load_policy(self.config.scheduling_policy).admits_beside(1):
            policy = self.config.scheduling_policy
            raise UnsupportedError(f"scheduling_policy {policy!r} lets no beam follow another", field="scheduling_policy")
        started = time.monotonic()
        submit = self._submission(prompt, SamplingParams(max_tokens=params.max_tokens), None, cache_salt=cache_salt)
        tokenized, admit = await anyio.to_thread.run_sync(half.resolver.resolve, submit)
        prompt_ids = tokenized.token_ids
        room = longest_sequence(half.resolver.capacity) - len(prompt_ids)
        ends = half.resolver.eos_token_ids
        search = Search(params, eos_token_ids=ends, max_tokens=min(params.max_tokens, room))

        def ask(token_ids: list[int], parent: RequestId | None, step: SamplingParams) -> RequestStream:
            part = msgspec.structs.replace(
                admit,
                request_id=half.new_id(),
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

    async def abort(self, request_id: str) -> None:
        """Abort the requests that have this label now. Unknown labels are a no-op; later requests are not touched.

        A no-op where the engine has stopped: everything has ended already.
        """
        if self._has_stopped:
            return
        half = self._living()
        for found in half.dispatcher.labelled(request_id):
            await half.submissions.post(Abort(found))

    def _submission(self, prompt: Prompt, params: SamplingParams | None, label: str | None, **fields: Any) -> Submit:
        params = SamplingParams() if params is None else params
        if label is not None and not isinstance(label, str):
            raise ValidationError(f"request_id must be text, not {type(label).__name__}", field="request_id", value=label)
        if not isinstance(params, SamplingParams):
            raise ValidationError(
                f"sampling_params must be SamplingParams, not {type(params).__name__}", field="sampling_params"
            )
        request_id = self._living().new_id()
        return Submit(
            request_id=request_id,
            label=show_request_id(request_id) if label is None else label,
            prompt=prompt.copy() if isinstance(prompt, list) else prompt,  # read later: the caller may change its own
            params=params,
            arrival_s=time.monotonic(),
            **fields,
        )

    def _traced(self, submit: Submit) -> Delivery:
        delivery = Delivery(submit)
        delivery.trace = tracing.begin(submit, self.config.served_model_name or self.config.model)
        return delivery

    def _stream(self, delivery: Delivery, half: FrontendHalf) -> RequestStream:
        return RequestStream(delivery, half.abort_nowait, half.grant, credit_window=self.config.credit_window)

    # ---- facts and controls ---------------------------------------------------------------------

    @property
    def capacity(self) -> Capacity:
        """What the device offers."""
        return self._living().resolver.capacity

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may be chat messages."""
        return self._living().resolver.reader.supports_chat

    @property
    def prompt_reader(self) -> PromptReader:
        """What turns prompts into ids, to be shared: it may be used in several threads at a time."""
        return self._living().resolver.reader

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer (of the `tokenizers` library), to be shared and not changed."""
        return self._living().resolver.reader.tokenizer

    @property
    @abstractmethod
    def is_draining(self) -> bool:
        """Whether new requests are refused because the engine finishes what runs."""

    @property
    @abstractmethod
    def _has_stopped(self) -> bool:
        """Whether there was an engine, and there is none now."""

    @abstractmethod
    async def stats(self) -> EngineStats:
        """A consistent snapshot."""

    @abstractmethod
    async def metrics(self) -> CoreMetrics:
        """All that is counted, at one moment."""

    async def metrics_text(self) -> bytes:
        """All that is counted, in Prometheus' text format: names begin with `repertory_`, nouns and units are vLLM's."""
        metrics = await self.metrics()
        return await anyio.to_thread.run_sync(_render, metrics)

    @abstractmethod
    async def audit(self) -> list[str]:
        """What does not add up in blocks, counts and tables; empty when all is well.

        When no request is live it first waits (5 s at most) for what is under way to settle.
        """

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request holds."""

    @abstractmethod
    async def check_health(self) -> None:
        """Raise `EngineDeadError` unless the engine serves."""

    @abstractmethod
    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and wait for those that run; False when `timeout_s` seconds were not enough.

        Raises `EngineDeadError` when the engine stops meanwhile.
        """


def _render(metrics: CoreMetrics) -> bytes:
    from ..observing.prometheus import render  # whoever never asks never loads it

    return render(metrics)
