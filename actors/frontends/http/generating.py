"""The two endpoints that generate: a body becomes a `Call`, and the call an answer."""

from __future__ import annotations

import msgspec

from ....protocol.errors import ValidationError, shorten
from ....protocol.sampling import SamplingParams, check_prompt_logprobs
from ...resolving import MAX_TRACE_CHARACTERS
from ..face import EngineFace, Prompt
from .answering import Call, answer
from .bodies import INLINE_BYTES, decode_body, read_body
from .chat import ChatForm
from .completions import CompletionForm
from .errors import HttpError
from .exchange import Exchange
from .forms import Form
from .off_the_loop import off_the_loop
from .prompts import conversation_of, prompts_of
from .requests import ChatRequest, CompletionRequest, Wanted
from .sampling import Defaults, chat_params, completion_params, own_spelling

_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_chat_decoder = msgspec.json.Decoder(ChatRequest)

MAX_CHOICES = 2048
"""Completions of all prompts of a request. One prompt may have as many as `SamplingParams` allow."""
_TRACE_HEADERS = (b"traceparent", b"tracestate")


class Generating:
    """The endpoints of one engine. `defaults` are the model's own sampling parameters; `model` is the name it is served by."""

    def __init__(self, engine: EngineFace, *, model: str, defaults: Defaults) -> None:
        self._engine = engine
        self._model = model
        self._defaults = defaults

    async def complete(self, exchange: Exchange) -> None:
        """`POST /v1/completions`."""
        body = await read_body(exchange.scope, exchange.receive)
        request = await decode_body(body, _completion_decoder, max_characters=self._max_characters)
        self._admit(exchange, request)
        params = completion_params(request, self._defaults)
        form = CompletionForm(
            request, exchange.request_id, self._model, decode=self._decode_prompt, stream_usage=_wants_usage(request)
        )
        prompts = prompts_of(request.prompt)
        _check_choices(len(prompts), params.n)
        await self._answer(exchange, request, prompts, params, form)

    async def chat(self, exchange: Exchange) -> None:
        """`POST /v1/chat/completions`."""
        body = await read_body(exchange.scope, exchange.receive)
        request = await decode_body(body, _chat_decoder, max_characters=self._max_characters)
        self._admit(exchange, request)
        params = chat_params(request, self._defaults)
        form = ChatForm(request, exchange.request_id, self._model, stream_usage=_wants_usage(request))
        is_small = len(body) <= INLINE_BYTES
        conversation = conversation_of(request) if is_small else await off_the_loop(conversation_of, request)
        await self._answer(exchange, request, [conversation], params, form)

    async def _answer(
        self, exchange: Exchange, request: Wanted, prompts: list[Prompt], params: SamplingParams, form: Form
    ) -> None:
        _check_prompt_logprobs(prompts, params)
        call = Call(
            prompts,
            params,
            form,
            is_stream=bool(request.stream),
            priority=request.priority or 0,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            trace_context=_trace_context(exchange),
        )
        try:
            await answer(self._engine, exchange, call)
        except ValidationError as error:
            error.field = own_spelling(request, error.field)
            raise

    @property
    def _max_characters(self) -> int:
        return self._engine.prompt_reader.max_characters

    def _decode_prompt(self, token_ids: list[int]) -> str:
        return str(self._engine.prompt_reader.tokenizer.decode(token_ids, skip_special_tokens=False))

    def _admit(self, exchange: Exchange, request: Wanted) -> None:
        exchange.call_it(request.request_id)
        check_model(request.model, self._model)


def _check_prompt_logprobs(prompts: list[Prompt], params: SamplingParams) -> None:
    """Of several prompts in one request the answer repeats all at once. Each alone is the engine's to judge."""
    if len(prompts) > 1:
        check_prompt_logprobs(params, sum(len(prompt) for prompt in prompts if isinstance(prompt, str | list)))


def check_model(asked: str | None, served: str) -> None:
    """Raise `HttpError` 404 for a model that is not served here. One that is not named is whichever there is."""
    if asked and asked != served:
        raise HttpError(404, f"the model {shorten(asked)} does not exist", param="model", code="model_not_found")


def _check_choices(num_prompts: int, n: int) -> None:
    if num_prompts > 1 and num_prompts * n > MAX_CHOICES:
        raise ValidationError(f"{num_prompts} prompts with n {n}: at most {MAX_CHOICES} choices", field="n", value=n)


def _wants_usage(request: Wanted) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def _trace_context(exchange: Exchange) -> dict[str, str] | None:
    found = {name.decode(): value for name in _TRACE_HEADERS if (value := exchange.header(name)) is not None}
    # One that cannot be meant is no reason to refuse the request.
    return found if found and sum(map(len, (*found, *found.values()))) <= MAX_TRACE_CHARACTERS else None
