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

OutputKind = Literal["cumulative", "delta", "final_only"]
FinishReason = Literal["stop", "length", "abort", "error"]

MAX_N = 128
"""Sequences of one request: OpenAI's limit."""
MAX_LOGPROBS = 20
"""Most likely tokens that can be asked for: OpenAI's limit, and vLLM's default one."""
MAX_BEAM_WIDTH = 32
MAX_LENGTH_PENALTY = 100.0
MAX_TOKENS_LIMIT = 2**31 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
SEED_RANGE = (-(2**63), 2**63 - 1)


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling and text parameters of one request.

    `n` sequences share the prompt; each draws from its own random stream. `temperature` 0 is greedy. `top_k` 0 or -1
    is off. `max_tokens` None means all the room there is, and larger values are clamped to it. `seed` makes the
    output repeatable, whatever runs beside it. `logprobs` asks for that many most likely tokens beside each token that
    is generated. `output_kind` chooses what each output holds: everything so far, only what is new, or nothing until
    the end.

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
    structured_outputs: Any = None
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


_NOT_BUILT = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "prompt_logprobs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
}
"""Fields that are accepted only at their default, until the issue that builds them lands."""


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
    for name, default in _NOT_BUILT.items():
        value = getattr(params, name)
        if value != default:
            raise UnsupportedError(f"{name} is not supported by this version (got {shorten(value)})", field=name, value=value)
    _real(params, "temperature", 0.0, math.inf)
    _real(params, "top_p", 0.0, 1.0, open_low=True)
    _real(params, "min_p", 0.0, 1.0)
    if params.top_k < -1:
        raise _bad(params, "top_k", "-1 or 0 (off) or a positive number")
    if params.logprobs is not None:
        _integer(params, "logprobs")
        if not 0 <= params.logprobs <= MAX_LOGPROBS:
            raise _bad(params, "logprobs", f"0 to {MAX_LOGPROBS}, or None")
    if params.seed is not None:
        _integer(params, "seed")
        if not SEED_RANGE[0] <= params.seed <= SEED_RANGE[1]:
            raise _bad(params, "seed", "a 64-bit integer")
    if params.max_tokens is not None:
        _integer(params, "max_tokens")
        if not 1 <= params.max_tokens <= MAX_TOKENS_LIMIT:
            raise _bad(params, "max_tokens", f"1 to {MAX_TOKENS_LIMIT}, or None")
    _check_stops(params)
    check_token_ids(params.stop_token_ids or [], field="stop_token_ids", vocab_size=vocab_size, limit=MAX_STOP_TOKEN_IDS)
    if params.output_kind not in ("cumulative", "delta", "final_only"):
        raise _bad(params, "output_kind", "cumulative, delta or final_only")
    for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
        if not isinstance(getattr(params, name), bool):
            raise _bad(params, name, "true or false")


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


AnyParams = SamplingParams | BeamSearchParams


def _integer(params: AnyParams, name: str) -> None:
    if type(getattr(params, name)) is not int:
        raise _bad(params, name, "an integer")


def _real(params: AnyParams, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    value = getattr(params, name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # A huge Python int has no float: comparing it is safe, converting it is not.
    if (
        not is_number
        or value != value
        or value in (math.inf, -math.inf)
        or value > 1e38
        or not low <= value <= high
        or (open_low and value == low)
    ):
        span = f"{'above' if open_low else 'at least'} {low:g}" + ("" if high == math.inf else f" and at most {high:g}")
        raise _bad(params, name, f"a finite number, {span}")


def _bad(params: AnyParams, name: str, allowed: str) -> ValidationError:
    value = getattr(params, name)
    return ValidationError(f"{name} must be {allowed}, got {shorten(value)}", field=name, value=value)
