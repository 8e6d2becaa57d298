"""What clients may send, as msgspec structs: OpenAI's fields and vLLM's further ones.

Every field may be null, which is as good as absent. What is not listed is ignored; what is listed and has a wrong type is
refused with its name (`bodies.py`), and what it may be beyond its type is checked where it is used. `Wanted` is what both
kinds of completion share. Fields under "refused" are known, and wanting them is an error, not something to overlook.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ....protocol.structured import StructuredOutputs


class StreamOptions(msgspec.Struct):
    """How a stream is told: `include_usage` adds an event with the usage at its end."""

    include_usage: bool | None = None


class JsonSchema(msgspec.Struct):
    """OpenAI's wrapping of a schema. `strict` is accepted either way: the schema always binds."""

    name: str | None = None
    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct):
    """`type` is text, json_object or json_schema."""

    type: str
    json_schema: JsonSchema | None = None


class Wanted(msgspec.Struct, kw_only=True):
    """The fields of both endpoints. Those named as in `SamplingParams` mean the same."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Any] | None = None
    """Ids; of any type here, so that the check of ids can name the one that is none."""
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Any] | None = None
    bad_words: list[str] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: int | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    # Refused.
    best_of: int | None = None
    use_beam_search: bool | None = None


class CompletionRequest(Wanted, kw_only=True):
    """`POST /v1/completions`. `prompt` is text, ids, or a list of either."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    # Refused.
    suffix: str | None = None


class ChatRequest(Wanted, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a text, or a chat as `ChatRequest` has it."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`: ids to their text, special tokens included."""

    model: str | None = None
    tokens: list[Any] | None = None
