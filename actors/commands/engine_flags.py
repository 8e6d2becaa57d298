"""`EngineConfig` as flags: name, type, default and help of each come from the struct, grouped by concern.

Flags that were not given are not in the mapping, so that a variable, a file or the default can
speak for them; `protocol/config_sources.py` decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from cyclopts import Group, Parameter

from ...protocol.config import FIELDS, choices, description, plain_type

GROUPS = {
    "Model": ("model", "dtype", "max_model_len", "quantization", "kv_cache_dtype", "chat_template", "seed"),
    "Device": ("device", "worker", "num_threads", "attention_backend", "enforce_eager"),
    "KV memory": (
        "block_size", "num_device_blocks", "cpu_kv_cache_bytes", "gpu_memory_utilization", "kv_offloading_size",
        "num_host_blocks", "enable_prefix_caching",
    ),
    "Scheduling": (
        "max_num_batched_tokens", "max_num_seqs", "max_num_queued", "enable_chunked_prefill", "max_prefill_batch_size",
        "scheduling_policy", "scheduling_delay_s", "scheduling_delay_factor", "preemption_mode", "target_itl_ms",
        "max_steps_in_flight", "speculative_window", "credit_window", "max_pause_s",
    ),
    "Supervision": ("heartbeat_timeout_s", "max_restarts", "restart_window_s"),
    "Serving": ("served_model_name", "host", "port", "api_key", "frontends"),
    "Observing": ("log_format", "log_level", "trace_file", "trace_content"),
}  # fmt: skip
"""Heading in the help -> settings. A setting that no heading names comes under `OTHERS`."""

OTHERS = "Other settings"

ConfigFile = Annotated[
    Path | None,
    Parameter(
        name="--config",
        group=Group("Configuration", sort_key=0),
        help="YAML file with any of the settings below; flags and variables REPERTORY_* win over it",
    ),
]


def engine_flags(*, without: Collection[str] = (), defaults: Mapping[str, Any] | None = None) -> Any:
    """A typed mapping with a flag for every setting but those in `without`, for `Parameter(name="*")`.

    `defaults` are the command's own, where it has others than the struct; they are only shown here.
    """
    shown = {key: field.default for key, field in FIELDS.items()} | dict(defaults or {})
    headings = {key: heading for heading, keys in GROUPS.items() for key in keys}
    groups = {heading: Group(heading, sort_key=order) for order, heading in enumerate([*GROUPS, OTHERS], start=10)}
    hints = {key: _hint(key, groups[headings.get(key, OTHERS)], shown[key]) for key in FIELDS if key not in without}
    return TypedDict("EngineFlags", hints, total=False)  # type: ignore[operator]  # its keys are known at run time only


def _hint(key: str, group: Group, default: Any) -> Any:
    words = choices(key)
    kind: Any = Literal[words] if words else plain_type(key)
    return Annotated[kind, Parameter(group=group, help=description(key) + _in_help(default))]


def _in_help(default: Any) -> str:
    if default is None or default is msgspec.NODEFAULT:
        return ""
    return f" [default: {str(default).lower() if isinstance(default, bool) else default}]"
