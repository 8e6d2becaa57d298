"""From a request's fields to `SamplingParams`: OpenAI's spellings, vLLM's, and the model's own defaults.

Only what has no counterpart there is checked here; the rest is `protocol.sampling.check`'s, which every path passes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ....protocol.errors import ConfigError, UnsupportedError, ValidationError, shorten
from ....protocol.sampling import MAX_LOGIT_BIAS_ENTRIES, MAX_LOGPROBS, MAX_TOKENS_LIMIT, SamplingParams, check
from ....protocol.structured import StructuredOutputs
from .errors import bad_request
from .requests import ChatRequest, CompletionRequest, Wanted

_SAME_NAMES = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "prompt_logprobs", "allowed_token_ids", "bad_words"),
)
_FROM_THE_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}

Defaults = dict[str, float]
"""What a request gets where it says nothing, by the names of `SamplingParams`."""


def model_defaults(model_dir: Path, *, vocab_size: int) -> Defaults:
    """The sampling parameters that the model's `generation_config.json` recommends.

    Raises `ConfigError` where they are not allowed: else every request would be refused for them.
    """
    file = model_dir / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        found = {name: settings[name] for name in _FROM_THE_MODEL if settings.get(name) is not None}
        check(SamplingParams(**found), vocab_size=vocab_size)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: {error}", key="model") from error
    return found


def completion_params(request: CompletionRequest, defaults: Defaults) -> SamplingParams:
    """Parameters of `/v1/completions`. Raises `HttpError` or `ValidationError` naming the field."""
    given = _given(request)
    if given.get("max_tokens") == 0 and request.echo:
        given["max_tokens"] = 1  # only the prompt is wanted: the token is left out of the answer
    if request.logprobs is not None:
        given["logprobs"] = request.logprobs
        if request.echo:
            given.setdefault("prompt_logprobs", request.logprobs)
    return _params(request, given, defaults)


def chat_params(request: ChatRequest, defaults: Defaults) -> SamplingParams:
    """Parameters of `/v1/chat/completions`. Raises `HttpError` or `ValidationError` naming the field."""
    given = {"max_tokens": None, **_given(request)}
    if request.max_completion_tokens is not None:
        if not 1 <= request.max_completion_tokens <= MAX_TOKENS_LIMIT:
            raise _out_of_range("max_completion_tokens", request.max_completion_tokens, f"1 to {MAX_TOKENS_LIMIT}")
        given["max_tokens"] = request.max_completion_tokens
    top = request.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise _out_of_range("top_logprobs", top, f"0 to {MAX_LOGPROBS}")
    if request.logprobs:
        given["logprobs"] = top or 0
    elif top:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    return _params(request, given, defaults)


def _given(request: Wanted) -> dict[str, Any]:
    _check_refused(request)
    return {name: value for name in _SAME_NAMES if (value := getattr(request, name)) is not None}


def _params(request: Wanted, given: dict[str, Any], defaults: Defaults) -> SamplingParams:
    return SamplingParams(
        **{**defaults, **given},
        logit_bias=_logit_bias(request.logit_bias),
        structured_outputs=_structured_outputs(request),
        output_kind="delta" if request.stream else "final_only",
    )


def _check_refused(request: Wanted) -> None:
    if request.best_of is not None and request.best_of != (1 if request.n is None else request.n):
        raise UnsupportedError(f"best_of must equal n, got {shorten(request.best_of)}", field="best_of")
    if request.use_beam_search:
        raise UnsupportedError("use_beam_search is not supported over HTTP", field="use_beam_search")
    if isinstance(request, CompletionRequest) and request.suffix:
        raise UnsupportedError("suffix is not supported", field="suffix")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs come with whole answers only: stream must be false", "prompt_logprobs")


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    """JSON's keys are text. The size is checked before anything of that size is made."""
    if bias is None:
        return None
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise ValidationError(
            f"logit_bias may hold at most {MAX_LOGIT_BIAS_ENTRIES} entries, got {len(bias)}", field="logit_bias"
        )
    return {_token_id(key): value for key, value in bias.items()}


def _token_id(key: str) -> int:
    if len(key) <= 20 and key.isascii() and key.removeprefix("-").isdigit():
        return int(key)
    raise ValidationError(f"logit_bias: {shorten(key)} is not a token id", field="logit_bias", value=key)


def own_spelling(request: Wanted, field: str | None) -> str | None:
    """The request's own name for a field of `SamplingParams`, where its value came under another."""
    if field == "structured_outputs" and request.structured_outputs is None:
        return next((name for name in ("response_format", *_GUIDED) if getattr(request, name) is not None), field)
    if field == "prompt_logprobs" and request.prompt_logprobs is None:
        return "logprobs"  # an echo's
    return field


def _structured_outputs(request: Wanted) -> StructuredOutputs | None:
    """The one constraint on the text, in whichever of three spellings it came."""
    found: dict[str, StructuredOutputs] = {}
    if request.structured_outputs is not None:
        found["structured_outputs"] = request.structured_outputs
    for name, kind in _GUIDED.items():
        if (value := getattr(request, name)) is not None:
            found[name] = StructuredOutputs(**{kind: value})
    if request.response_format is not None and (wanted := _of_format(request)) is not None:
        found["response_format"] = wanted
    if len(found) > 1:
        *_, last = found
        raise bad_request(f"only one of {', '.join(found)} may be given", last)
    return next(iter(found.values()), None)


def _of_format(request: Wanted) -> StructuredOutputs | None:
    wanted = request.response_format
    assert wanted is not None
    match wanted.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutputs(json_object=True)
        case "json_schema" if wanted.json_schema is not None and wanted.json_schema.schema is not None:
            return StructuredOutputs(json=wanted.json_schema.schema)
        case "json_schema":
            raise bad_request("response_format.json_schema.schema is missing", "response_format")
        case _:
            raise bad_request(
                f"response_format.type must be text, json_object or json_schema, got {shorten(wanted.type)}", "response_format"
            )


def _out_of_range(name: str, value: int, allowed: str) -> ValidationError:
    return ValidationError(f"{name} must be {allowed}, got {shorten(value)}", field=name, value=value)
