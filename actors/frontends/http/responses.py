"""What clients get, as msgspec structs in OpenAI's shapes. What only vLLM has is left out unless it was asked for."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ....protocol.outputs import Logprob, RequestOutput

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity: this stands for it, as in vLLM."""

TokenChoices = dict[int, Logprob] | None
PromptLogprobs = list[TokenChoices]


class CachedTokens(msgspec.Struct, gc=False):
    """How many of the prompt's tokens the prefix cache held."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, gc=False):
    """Tokens of all prompts, and of all completions, of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(msgspec.Struct):
    """Columns, one entry for each token. `text_offset` counts characters from the choice's beginning."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A completion, or (streaming) what is new of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: Any = UNSET


class ChatTopLogprob(msgspec.Struct):
    """One of the most likely tokens. `bytes` is its text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """The token that was chosen, and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry for each token."""

    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct):
    """What the assistant says."""

    content: str
    role: str = "assistant"


class ChatChoice(msgspec.Struct, kw_only=True):
    """A whole answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, gc=False, omit_defaults=True):
    """What is new of an answer. The first of a choice says whose it is."""

    content: str | None = None
    role: str | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True, gc=False):
    """What is new of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Answer(msgspec.Struct, kw_only=True):
    """A whole answer of either endpoint."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage
    system_fingerprint: None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: Any = UNSET


class Tokens(msgspec.Struct):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


class Text(msgspec.Struct):
    """The answer of `/detokenize`."""

    prompt: str


def usage_of(num_prompt: int, num_output: int, num_cached: int) -> Usage:
    """The usage of a request, by token counts."""
    return Usage(num_prompt, num_output, num_prompt + num_output, CachedTokens(num_cached))


def prompt_logprobs_of(output: RequestOutput) -> PromptLogprobs | None:
    """The prompt's log-probabilities by position and token id, finite; None where they were not asked for."""
    if output.prompt_logprobs is None:
        return None
    return [
        None if entry is None else {token: _finite(one) for token, one in entry.items()} for entry in output.prompt_logprobs
    ]


def _finite(one: Logprob) -> Logprob:
    return one if one.logprob > LOWEST_LOGPROB else msgspec.structs.replace(one, logprob=LOWEST_LOGPROB)
