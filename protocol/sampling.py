"""How one request wants its tokens chosen and its text cut.

Names, meanings and defaults are vLLM's and OpenAI's. `check` is the one gate: it runs before
anything is allocated for the request, refuses what is out of range with the field's name, and
refuses by name what this version does not implement.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from .errors import UnsupportedError, ValidationError, shorten
from .structured import StructuredOutputs, check_structured_outputs

OutputKind = Literal["cumulative", "delta", "final_only"]
FinishReason = Literal["stop", "length", "abort", "error"]

MAX_N = 128
"""Sequences of one request: OpenAI's limit."""
MAX_LOGPROBS = 20
"""Most likely tokens that can be asked for: OpenAI's limit, and vLLM's default one."""
MAX_PROMPT_LOGPROBS_ENTRIES = 200_000
"""Tokens that all of a request's prompt positions may name, for each of its completions anew: answers repeat them."""
MAX_BEAM_WIDTH = 32
MAX_LENGTH_PENALTY = 32.0
"""A hundred thousand tokens to this power are still a number."""
MAX_TOKENS_LIMIT = 2**31 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_PENALTY = 2.0
"""Size of presence and frequency penalties: OpenAI's and vLLM's limit."""
REPETITION_RANGE = (0.01, 100.0)
"""vLLM asks for more than 0 only; beyond these a logit of everyday size leaves float32 after a few tokens, or nothing moves."""
MAX_LOGIT_BIAS = 100.0
"""OpenAI's limit, which is practically a ban or a must."""
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256
SEED_RANGE = (-(2**63), 2**63 - 1)


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling and text parameters of one request.

    `n` sequences share the prompt; each draws from its own random stream. `temperature` 0 is greedy. `top_k` 0 or -1
    is off. `max_tokens` None means all the room there is, and larger values are clamped to it. `seed` makes the
    output repeatable, whatever runs beside it. `logprobs` asks for that many most likely tokens beside each token that
    is generated, `prompt_logprobs` for as many beside each token of the prompt, all of which is computed for it, cached or
    not. `output_kind` chooses what each output holds: everything so far, only what is new, or nothing until
    the end.

    `presence_penalty` and `frequency_penalty` are subtracted from the logits of tokens in the output, the first once, the
    second for each time; `repetition_penalty` divides positive logits of tokens in prompt or output and multiplies negative
    ones. `logit_bias` is added to the logits of these ids. Only `allowed_token_ids` are chosen, and no token that would
    complete one of `bad_words`, at the beginning of a text or behind a space. Below `min_tokens` of output no stop id and
    none of the model's ends is chosen (with `ignore_eos` neither), and no stop string looked for. With `structured_outputs`
    the output is what a schema, an expression or a grammar allows, to its end.

    Raises `ValidationError` or `UnsupportedError` (through `check`) naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    output_kind: OutputKind = "cumulative"

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list, empty when there is none."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


class BeamSearchParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a beam search goes: `beam_width` continuations are kept, of `max_tokens` tokens at most.

    A finished one's log-probability is divided by its length to the power of `length_penalty`: above 0 favours the
    long, below the short. `temperature` has vLLM's place and one value, 0: a beam search draws nothing.

    Raises `ValidationError` or `UnsupportedError` (through `check_beams`) naming the field.
    """

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0


def check(params: SamplingParams, *, vocab_size: int) -> None:
    """Refuse `params` unless every field is in range and implemented.

    Raises `ValidationError` (or `UnsupportedError`) that names the field, its value and the
    allowed range. Costs no more than a fixed amount, however large the values are.
    """
    if not isinstance(params, SamplingParams):
        raise ValidationError(f"sampling_params must be SamplingParams, not {type(params).__name__}", field="sampling_params")
    for name in ("n", "top_k", "min_tokens"):
        _integer(params, name)
    if not 1 <= params.n <= MAX_N:
        raise _bad(params, "n", f"1 to {MAX_N}")
    _real(params, "temperature", 0.0, math.inf)
    _real(params, "top_p", 0.0, 1.0, open_low=True)
    _real(params, "min_p", 0.0, 1.0)
    _real(params, "presence_penalty", -MAX_PENALTY, MAX_PENALTY)
    _real(params, "frequency_penalty", -MAX_PENALTY, MAX_PENALTY)
    _real(params, "repetition_penalty", *REPETITION_RANGE)
    if params.top_k < -1:
        raise _bad(params, "top_k", "-1 or 0 (off) or a positive number")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _integer(params, name)
            if not 0 <= getattr(params, name) <= MAX_LOGPROBS:
                raise _bad(params, name, f"0 to {MAX_LOGPROBS}, or None")
    if params.seed is not None:
        _integer(params, "seed")
        if not SEED_RANGE[0] <= params.seed <= SEED_RANGE[1]:
            raise _bad(params, "seed", "a 64-bit integer")
    if params.max_tokens is not None:
        _integer(params, "max_tokens")
        if not 1 <= params.max_tokens <= MAX_TOKENS_LIMIT:
            raise _bad(params, "max_tokens", f"1 to {MAX_TOKENS_LIMIT}, or None")
    most = MAX_TOKENS_LIMIT if params.max_tokens is None else params.max_tokens
    if not 0 <= params.min_tokens <= most:
        raise _bad(params, "min_tokens", f"0 to {most}" + (" (max_tokens)" if params.max_tokens is not None else ""))
    _check_stops(params)
    _check_bad_words(params)
    _check_chosen_ids(params, vocab_size)
    if params.structured_outputs is not None:
        check_structured_outputs(params.structured_outputs)
    check_token_ids(params.stop_token_ids or [], field="stop_token_ids", vocab_size=vocab_size, limit=MAX_STOP_TOKEN_IDS)
    if params.output_kind not in ("cumulative", "delta", "final_only"):
        raise _bad(params, "output_kind", "cumulative, delta or final_only")
    for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
        if not isinstance(getattr(params, name), bool):
            raise _bad(params, name, "true or false")


def check_prompt_logprobs(params: SamplingParams, num_prompt_tokens: int) -> None:
    """Refuse `prompt_logprobs` of a prompt that is too long for them. Raises `ValidationError` with the numbers."""
    if params.prompt_logprobs is None:
        return
    num_entries = params.n * num_prompt_tokens * (params.prompt_logprobs + 1)
    if num_entries > MAX_PROMPT_LOGPROBS_ENTRIES:
        raise ValidationError(
            f"prompt_logprobs {params.prompt_logprobs} of {num_prompt_tokens} prompt tokens"
            + (f" for n = {params.n}" if params.n > 1 else "")
            + f" come to {num_entries} entries, more than {MAX_PROMPT_LOGPROBS_ENTRIES}",
            field="prompt_logprobs",
            value=params.prompt_logprobs,
        )


def check_beams(params: BeamSearchParams) -> None:
    """Refuse `params` unless every field is in range: as `check` does."""
    if not isinstance(params, BeamSearchParams):
        raise ValidationError(f"params must be BeamSearchParams, not {type(params).__name__}", field="params")
    for name, most in (("beam_width", MAX_BEAM_WIDTH), ("max_tokens", MAX_TOKENS_LIMIT)):
        _integer(params, name)
        if not 1 <= getattr(params, name) <= most:
            raise _bad(params, name, f"1 to {most}")
    if not isinstance(params.ignore_eos, bool):
        raise _bad(params, "ignore_eos", "true or false")
    _real(params, "length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    if params.temperature != 0:
        raise UnsupportedError(
            f"temperature of a beam search must be 0, got {shorten(params.temperature)}",
            field="temperature",
            value=params.temperature,
        )


def check_token_ids(ids: Any, *, field: str, vocab_size: int, limit: int | None = None) -> None:
    """Refuse anything but a list of integers in [0, vocab_size); the message names the first bad one."""
    if not isinstance(ids, (list, tuple)):
        raise ValidationError(f"{field} must be a list of token ids, got {shorten(ids)}", field=field, value=ids)
    if limit is not None and len(ids) > limit:
        raise ValidationError(f"{field} may hold at most {limit} ids, got {len(ids)}", field=field)
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValidationError(
                f"{field}[{position}] = {shorten(token)} is not a token id (0 to {vocab_size - 1})", field=field, value=token
            )


def _check_stops(params: SamplingParams) -> None:
    if params.stop is not None and not isinstance(params.stop, (str, list, tuple)):
        raise _bad(params, "stop", "a string or a list of strings")
    stops = [params.stop] if isinstance(params.stop, str) else (params.stop or [])
    if len(stops) > MAX_STOP_STRINGS:
        raise _bad(params, "stop", f"at most {MAX_STOP_STRINGS} strings")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise _bad(params, "stop", f"strings of 1 to {MAX_STOP_CHARACTERS} characters")


def _check_bad_words(params: SamplingParams) -> None:
    words = params.bad_words
    if words is None:
        return
    if not isinstance(words, (list, tuple)):
        raise _bad(params, "bad_words", "a list of strings")
    if len(words) > MAX_BAD_WORDS:
        raise ValidationError(f"bad_words may hold at most {MAX_BAD_WORDS} strings, got {len(words)}", field="bad_words")
    for word in words:
        if not isinstance(word, str) or not 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS or not word.strip():
            raise ValidationError(
                f"bad_words must be strings of 1 to {MAX_BAD_WORD_CHARACTERS} characters, not only space, got {shorten(word)}",
                field="bad_words",
                value=word,
            )


def _check_chosen_ids(params: SamplingParams, vocab_size: int) -> None:
    allowed, bias = params.allowed_token_ids, params.logit_bias
    if allowed is not None:
        check_token_ids(allowed, field="allowed_token_ids", vocab_size=vocab_size, limit=MAX_ALLOWED_TOKEN_IDS)
        if not allowed:
            raise ValidationError("allowed_token_ids must be None or hold at least one id", field="allowed_token_ids", value=[])
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise _bad(params, "logit_bias", "a mapping of token ids to numbers")
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise ValidationError(
            f"logit_bias may hold at most {MAX_LOGIT_BIAS_ENTRIES} entries, got {len(bias)}", field="logit_bias"
        )
    for token, value in bias.items():
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValidationError(
                f"logit_bias: {shorten(token)} is not a token id (0 to {vocab_size - 1})", field="logit_bias", value=token
            )
        if not _is_number(value) or not -MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS:
            raise ValidationError(
                f"logit_bias[{token}] must be {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}, got {shorten(value)}",
                field="logit_bias",
                value=value,
            )


AnyParams = SamplingParams | BeamSearchParams


def _integer(params: AnyParams, name: str) -> None:
    if type(getattr(params, name)) is not int:
        raise _bad(params, name, "an integer")


def _real(params: AnyParams, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    value = getattr(params, name)
    # A huge Python int has no float: comparing it is safe, converting it is not.
    if (
        not _is_number(value)
        or value != value
        or value in (math.inf, -math.inf)
        or value > 1e38
        or not low <= value <= high
        or (open_low and value == low)
    ):
        span = f"{'above' if open_low else 'at least'} {low:g}" + ("" if high == math.inf else f" and at most {high:g}")
        raise _bad(params, name, f"a finite number, {span}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _bad(params: AnyParams, name: str, allowed: str) -> ValidationError:
    value = getattr(params, name)
    return ValidationError(f"{name} must be {allowed}, got {shorten(value)}", field=name, value=value)
