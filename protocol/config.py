"""The engine's configuration: every setting once, with its default, range and explanation.

The same fields serve Python (`EngineConfig(...)`), flags (`--kebab-case`), variables
(`REPERTORY_*`) and YAML; `config_sources.py` reads the last three. The help text of the command
line is the description written here.
"""

from __future__ import annotations

import math
import os
from typing import Annotated, Any, Literal

import msgspec
import msgspec.inspect
from msgspec import Meta

from .errors import ConfigError, shorten

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
WorkerKind = Literal["process", "inline"]
PreemptionMode = Literal["auto", "recompute", "swap", "heuristic"]
LogFormat = Literal["auto", "console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
Positive = Annotated[int, Meta(ge=1)]
AtLeastTwo = Annotated[int, Meta(ge=2)]
NotNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]

MIN_GPU_CHUNK = 512
"""Below this many tokens a prefill chunk wastes a GPU (the seed's pitfall 1)."""

MAX_INTEGER_BITS = 63
"""Integers travel between processes as msgpack, which has 64 bits and a sign."""

SECRETS = frozenset({"api_key"})
"""Fields whose values appear in no log and no error."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an engine can be told. Defaults suit the machine; only `model` is required.

    Raises `ConfigError` naming the key where a value is out of range (through `checked`).
    """

    model: Annotated[str, Meta(description="directory with config.json and safetensors, a .gguf file, a hub id, or 'demo'")]
    dtype: Annotated[Dtype, Meta(description="weights and KV; auto: bfloat16 where the device is fast at it")] = "auto"
    device: Annotated[str, Meta(description="auto, cpu, cuda, cuda:N or simulated")] = "auto"
    worker: Annotated[WorkerKind, Meta(description="where the device runs: its own process, or a thread of this one")] = (
        "process"
    )
    num_threads: Annotated[Positive | None, Meta(description="compute threads on CPU (default: cores - 1)")] = None
    max_model_len: Annotated[
        AtLeastTwo | None, Meta(description="longest prompt + output in tokens (default: the model's)")
    ] = None
    seed: Annotated[int | None, Meta(description="server-wide seed: makes unseeded requests repeatable")] = None
    block_size: Annotated[int, Meta(description="tokens in a KV block", ge=1, le=1024)] = 16
    num_device_blocks: Annotated[
        AtLeastTwo | None, Meta(description="KV blocks on the device (default: from the memory settings)")
    ] = None
    cpu_kv_cache_bytes: Annotated[int, Meta(description="KV pool size on CPU, in bytes", ge=1)] = 1 << 30
    gpu_memory_utilization: Annotated[float, Meta(description="share of device memory to use", gt=0, le=1)] = 0.9
    kv_offloading_size: Annotated[float, Meta(description="host KV pool in GiB; 0: no host tier", ge=0)] = 0.5
    num_host_blocks: Annotated[NotNegative | None, Meta(description="KV blocks on the host (overrides kv_offloading_size)")] = (
        None
    )
    max_num_batched_tokens: Annotated[
        Positive | None, Meta(description="token budget of a step (default: 2048 on CUDA, 512 on CPU)")
    ] = None
    max_num_seqs: Annotated[
        Positive | None, Meta(description="running sequences at most (default: 256 on CUDA, 64 on CPU)")
    ] = None
    max_num_queued: Annotated[int, Meta(description="waiting requests before new ones are refused", ge=1)] = 1024
    enable_chunked_prefill: Annotated[bool, Meta(description="split long prompts over several steps")] = True
    enable_prefix_caching: Annotated[bool, Meta(description="share the KV of common prefixes between requests")] = True
    max_prefill_batch_size: Annotated[Positive | None, Meta(description="prefills in one step at most")] = None
    scheduling_policy: Annotated[
        str, Meta(description="order of requests: fcfs, priority, longest-prefix, fair-share, static, or an installed policy")
    ] = "fcfs"
    scheduling_delay_s: Annotated[float, Meta(description="longest wait to gather a batch, in seconds", ge=0)] = 0.0
    scheduling_delay_factor: Annotated[
        float, Meta(description="the same, as a multiple of the last prefill step's duration", ge=0)
    ] = 0.0
    preemption_mode: Annotated[PreemptionMode, Meta(description="what to do when KV memory runs out")] = "auto"
    target_itl_ms: Annotated[
        PositiveFloat | None,
        Meta(description="gap between tokens to keep to: prompts get what time is left beside decodes (needs chunked prefill)"),
    ] = None
    attention_backend: Annotated[str, Meta(description="attention implementation, or auto")] = "auto"
    max_steps_in_flight: Annotated[int, Meta(description="steps planned ahead; 1 switches overlap off", ge=1, le=2)] = 2
    credit_window: Annotated[int, Meta(description="output tokens a slow reader may fall behind", ge=1)] = 1024
    max_pause_s: Annotated[float, Meta(description="how long a reader out of credit may pause, in seconds", gt=0)] = 300.0
    heartbeat_timeout_s: Annotated[float, Meta(description="silence after which the device host counts as dead", gt=0)] = 10.0
    max_restarts: Annotated[int, Meta(description="device deaths without progress before the engine stops", ge=0)] = 5
    restart_window_s: Annotated[float, Meta(description="window in which they are counted, in seconds", gt=0)] = 60.0
    enforce_eager: Annotated[bool, Meta(description="switch CUDA graphs off")] = False
    quantization: Annotated[str | None, Meta(description="weight quantisation (fp8)")] = None
    kv_cache_dtype: Annotated[str, Meta(description="KV element type, or auto")] = "auto"
    speculative_window: Annotated[int, Meta(description="speculative tokens per step; at most half the chunk size", ge=0)] = 0
    served_model_name: Annotated[str | None, Meta(description="name the model is served under")] = None
    chat_template: Annotated[str | None, Meta(description="file with a Jinja chat template")] = None
    host: Annotated[str, Meta(description="address the HTTP frontend binds")] = "127.0.0.1"
    port: Annotated[int, Meta(description="port the HTTP frontend binds", ge=0, le=65535)] = 8000
    api_key: Annotated[str | None, Meta(description="bearer key that guards /v1")] = None
    frontends: Annotated[int, Meta(description="frontend processes", ge=1)] = 1
    log_format: Annotated[LogFormat, Meta(description="auto: console on a terminal, JSON otherwise")] = "auto"
    log_level: Annotated[LogLevel, Meta(description="least severe event that is logged")] = "info"
    trace_file: Annotated[str | None, Meta(description="where the run's trace goes; an earlier file is kept as FILE.1")] = None
    trace_content: Annotated[bool, Meta(description="put token ids into the trace, from which texts can be read")] = False

    @property
    def is_cuda(self) -> bool:
        """Whether `device` names a CUDA device."""
        return self.device.startswith("cuda")

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens`, or the device's default."""
        return self.max_num_batched_tokens or (2048 if self.is_cuda else 512)

    @property
    def running_limit(self) -> int:
        """`max_num_seqs`, or the device's default."""
        return self.max_num_seqs or (256 if self.is_cuda else 64)

    @property
    def target_itl_s(self) -> float | None:
        """`target_itl_ms` in seconds."""
        return None if self.target_itl_ms is None else self.target_itl_ms / 1e3

    @property
    def compute_threads(self) -> int:
        """`num_threads`, or all cores but one: a core left over keeps the event loop off the kernels' back."""
        return self.num_threads or max(1, (os.cpu_count() or 1) - 1)


FIELDS = {field.name: field for field in msgspec.structs.fields(EngineConfig)}
"""Every setting by name, in the order of the class."""


def checked(config: EngineConfig) -> EngineConfig:
    """Return `config` if every value is of its type and in range; else raise `ConfigError` with the key.

    msgspec does not validate a struct that Python builds, so each field is converted here.
    """
    config = EngineConfig(**{key: converted(key, getattr(config, key)) for key in FIELDS})
    if config.speculative_window * 2 > config.token_budget:
        raise ConfigError(
            f"speculative_window {config.speculative_window} is more than half of max_num_batched_tokens {config.token_budget}",
            key="speculative_window",
        )
    if config.target_itl_ms is not None and not config.enable_chunked_prefill:
        raise ConfigError(
            f"target_itl_ms {config.target_itl_ms:g} needs enable_chunked_prefill: a prompt computed whole keeps to no target",
            key="target_itl_ms",
        )
    if config.device not in ("auto", "cpu", "cuda", "simulated") and not _is_cuda_index(config.device):
        raise ConfigError(f"device {config.device!r} is not auto, cpu, cuda, cuda:N or simulated", key="device")
    return config


def converted(key: str, value: Any, *, source: str | None = None) -> Any:
    """`value` as field `key` holds it (an integer is a fine float; a bool is no integer).

    Raises `ConfigError` that names `source` (default: the key), the value and what is allowed.
    """
    try:
        result = msgspec.convert(value, FIELDS[key].type)
    except msgspec.ValidationError:
        result = math.nan
    if isinstance(result, float) and not math.isfinite(result):
        raise not_allowed(key, value, source=source)
    if isinstance(result, int) and result.bit_length() > MAX_INTEGER_BITS:
        raise not_allowed(key, value, source=source)
    return result


def not_allowed(key: str, value: Any, *, source: str | None = None) -> ConfigError:
    """The error for a value that field `key` cannot hold. A secret's value is not shown."""
    shown = "this value" if key in SECRETS else shorten(value)
    return ConfigError(f"{source or key}: {shown} is not allowed; expected {allowed(key)}", key=key)


def allowed(key: str) -> str:
    """What field `key` may hold, in words."""
    return " or ".join(_in_words(part) for part in _kinds(key))


def plain_type(key: str) -> type[bool] | type[int] | type[float] | type[str]:
    """The type of field `key` without its range, its choices and its none."""
    match _kinds(key)[0]:
        case msgspec.inspect.BoolType():
            return bool
        case msgspec.inspect.IntType():
            return int
        case msgspec.inspect.FloatType():
            return float
        case _:
            return str


def choices(key: str) -> tuple[str, ...]:
    """The words that field `key` may hold, where it is one of a few; else nothing."""
    kind = _kinds(key)[0]
    return tuple(map(str, kind.values)) if isinstance(kind, msgspec.inspect.LiteralType) else ()


def description(key: str) -> str:
    """What field `key` means, for the command line's help."""
    info = msgspec.inspect.type_info(FIELDS[key].type)
    extra = info.extra_json_schema if isinstance(info, msgspec.inspect.Metadata) else None
    return str((extra or {}).get("description", ""))


def shown(config: EngineConfig) -> dict[str, Any]:
    """The settings that differ from their defaults, for the start line of the log; secrets are starred out."""
    values = {key: getattr(config, key) for key, field in FIELDS.items() if getattr(config, key) != field.default}
    return {key: "***" if key in SECRETS else value for key, value in values.items()}


def pitfalls(config: EngineConfig) -> list[str]:
    """Warnings for settings that are allowed and usually a mistake (section 8.2 of the seed)."""
    found = []
    if config.is_cuda and config.enable_chunked_prefill and config.token_budget < MIN_GPU_CHUNK:
        found.append(
            f"max_num_batched_tokens {config.token_budget} makes prefill chunks smaller than {MIN_GPU_CHUNK} tokens: "
            "launch overhead dominates on a GPU"
        )
    if config.trace_content and config.trace_file is None:
        found.append("trace_content has no effect without a trace_file")
    if config.gpu_memory_utilization > 0.95:
        found.append(
            f"gpu_memory_utilization {config.gpu_memory_utilization} leaves no room for activations; 0.9 is the default"
        )
    return found


def _kinds(key: str) -> tuple[msgspec.inspect.Type, ...]:
    info = msgspec.inspect.type_info(FIELDS[key].type)
    while isinstance(info, msgspec.inspect.Metadata):
        info = info.type
    return info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)


def _in_words(info: msgspec.inspect.Type) -> str:
    match info:
        case msgspec.inspect.NoneType():
            return "none"
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.LiteralType(values=values):
            return "one of " + ", ".join(str(value) for value in values)
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            kind = "an integer" if isinstance(info, msgspec.inspect.IntType) else "a number"
            bounds = {"at least": info.ge, "above": info.gt, "at most": info.le, "below": info.lt}
            limits = [f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None]
            return f"{kind}, {' and '.join(limits)}" if limits else kind
        case _:
            return "text"


def _is_cuda_index(device: str) -> bool:
    kind, _, index = device.partition(":")
    return kind == "cuda" and index.isascii() and index.isdecimal()
