"""What is to be simulated: requests, a device's size and speed, and a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from cyclopts import Group, Parameter

from ....protocol.capacity import Capacity
from ....protocol.config import FIELDS, EngineConfig, checked
from ....protocol.config_sources import load_config
from ....protocol.errors import ValidationError
from ....protocol.trace_reading import Trace, read_trace
from ...simulation.formats import FORMATS, Loaded, detect, load
from ...simulation.generators import GENERATORS, Shape
from ...simulation.latency import LatencyModel
from ...simulation.recorded import read_recorded
from ...simulation.replay import config_of
from ...simulation.whatif import Outcome
from ...simulation.workload import Job

if TYPE_CHECKING:
    from ...simulation.fitting import Fit

OWN = "repertory"
"""The format of our own traces."""

KV_TOKEN_BYTES = 128 * 1024
NUM_BLOCKS = 32_768
MAX_MODEL_LEN = 1 << 18
DEVICE_DEFAULTS: Mapping[str, Any] = {
    "model": "simulated",
    "device": "cuda",
    "num_device_blocks": NUM_BLOCKS,
    "kv_offloading_size": 0.0,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_queued": 1_000_000,
}
"""Of what no trace tells: a large GPU with 64 GiB of KV, and nobody is refused."""
LATENCY = LatencyModel(step_s=6e-3, token_s=40e-6, attended_s=5e-9, row_s=20e-6, copy_s=20e-6, out_rate=20e9, in_rate=20e9)
"""An 8B model on a large GPU: 40 us a prefill token, 128 KiB of KV a token."""

_FIELDS = {
    "step_ms": ("step_s", 1e3),
    "prefill_us": ("token_s", 1e6),
    "attend_ns": ("attended_s", 1e9),
    "row_us": ("row_s", 1e6),
    "copy_us": ("copy_s", 1e6),
}
"""Flag -> field of `LatencyModel`, and the flag's units in a second."""

DEVICE = Group("Device", sort_key=2)
GENERATE = Group("Requests made up", sort_key=1)


@dataclass(frozen=True)
class DeviceFlags:
    """How fast the device is; what is not given is fitted from the trace, or that of an 8B model on a large GPU."""

    step_ms: Annotated[float | None, Parameter(help="of a step, whatever is in it [default: fitted, or 6]")] = None
    prefill_us: Annotated[float | None, Parameter(help="of each prompt token [default: fitted, or 40]")] = None
    attend_ns: Annotated[float | None, Parameter(help="of each pair of query and key [default: fitted, or 5]")] = None
    row_us: Annotated[float | None, Parameter(help="of each row of a step [default: fitted, or 20]")] = None
    copy_us: Annotated[float | None, Parameter(help="to start a copy [default: fitted, or 20]")] = None
    copy_gb_s: Annotated[float | None, Parameter(help="of copies, each way [default: fitted, or 20]")] = None

    def applied_to(self, model: LatencyModel) -> LatencyModel:
        """`model` with what was given. Raises `ValidationError` for what is below 0, or no rate."""
        changes: dict[str, float] = {}
        for flag, (field, unit) in _FIELDS.items():
            value = getattr(self, flag)
            if value is not None:
                _not_negative(flag, value)
                changes[field] = value / unit
        if self.copy_gb_s is not None:
            if not 0 < self.copy_gb_s < float("inf"):
                raise ValidationError(
                    f"--copy-gb-s must be above 0, got {self.copy_gb_s:g}", field="copy_gb_s", value=self.copy_gb_s
                )
            changes["out_rate"] = changes["in_rate"] = self.copy_gb_s * 1e9
        return msgspec.structs.replace(model, **changes)


@dataclass(frozen=True)
class GenerateFlags:
    """Requests made up by rule and seed. Lengths are means in tokens."""

    generate: Annotated[str | None, Parameter(help=f"in place of a file: {', '.join(GENERATORS)}")] = None
    requests: Annotated[int, Parameter(help="how many")] = 1000
    rate: Annotated[float, Parameter(help="requests a second")] = 4.0
    seed: Annotated[int, Parameter(help="of times, lengths and what is shared")] = 1
    input_len: Annotated[int, Parameter(help="prompt tokens of a request's own")] = 512
    output_len: Annotated[int, Parameter(help="output tokens")] = 128
    prefix_len: Annotated[int, Parameter(help="tokens that a group, or all chats, begin with")] = 1024
    groups: Annotated[int, Parameter(help="groups with a prefix each (shared-prefix, mooncake-like)")] = 8
    turns: Annotated[int, Parameter(help="turns of a chat (chats, mooncake-like)")] = 4
    burst: Annotated[int, Parameter(help="requests that come at once (bursts)")] = 32
    think_s: Annotated[float, Parameter(help="between an answer and the next turn, seconds")] = 10.0

    def jobs(self) -> list[Job]:
        """The requests. Raises `ValidationError` naming the flag."""
        assert self.generate is not None, "nothing is to be generated"
        if self.generate not in GENERATORS:
            raise ValidationError(
                f"--generate: {self.generate!r} is not one of {', '.join(GENERATORS)}", field="generate", value=self.generate
            )
        for name in ("requests", "input_len", "output_len", "prefix_len", "groups", "turns", "burst"):
            if getattr(self, name) < 1:
                raise ValidationError(f"{_flag(name)} must be at least 1, got {getattr(self, name)}", field=name)
        for name in ("rate", "think_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValidationError(f"{_flag(name)} must be above 0, got {getattr(self, name)}", field=name)
        values = {name: getattr(self, name) for name in Shape.__struct_fields__ if name != "count"}
        return GENERATORS[self.generate](Shape(count=self.requests, **values))


class Source(NamedTuple):
    """What to simulate, and on what."""

    name: str
    jobs: list[Job]
    num_left_out: int
    config: EngineConfig
    capacity: Capacity
    latency: LatencyModel
    fit: Fit | None
    measured: Outcome | None
    """What was recorded, where the source is a trace of our own."""


def own_trace(path: Path, format: str | None) -> Trace | None:
    """The trace in `path`, if that is one of our own. Raises `ValidationError` where it is no trace at all."""
    if format not in (None, OWN, *FORMATS):
        raise ValidationError(f"--format: {format!r} is not one of {', '.join((OWN, *FORMATS))}", field="format", value=format)
    return read_trace(path) if (format or detect(path)) == OWN else None


def of_trace(
    path: Path, trace: Trace, settings: Mapping[str, Any], file: Path | None, device: DeviceFlags, *, load: float
) -> Source:
    """A trace of our own under its own configuration, changed by `settings`, variables and `file` in that order."""
    from ...simulation.fitting import fit  # brings numpy with it

    recorded_config = config_of(trace.began)
    config = load_config(flags=settings, file=file, defaults=msgspec.structs.asdict(recorded_config))
    changed = {key: getattr(config, key) for key in FIELDS if getattr(config, key) != getattr(recorded_config, key)}
    recorded = read_recorded(trace)
    try:
        fitted = fit(trace.records)
    except ValidationError:
        if device.step_ms is None:
            raise
        fitted = None
    latency = device.applied_to(LATENCY if fitted is None else fitted.latency)
    capacity = _resized(trace.began.capacity, config, changed)
    jobs = faster(recorded.jobs, load)
    return Source(str(path), jobs, recorded.num_left_out, config, capacity, latency, fitted, recorded.measured)


def of_workload(
    name: str, loaded: Loaded, settings: Mapping[str, Any], file: Path | None, device: DeviceFlags, *, load: float
) -> Source:
    """Requests from elsewhere, on a device of the default size and speed unless `settings` and `device` say otherwise."""
    config = load_config(flags=settings, file=file, defaults=DEVICE_DEFAULTS)
    capacity = _capacity(config)
    latency = device.applied_to(LATENCY)
    return Source(name, faster(loaded.jobs, load), loaded.num_left_out, config, capacity, latency, None, None)


def loaded(path: Path | None, format: str | None, generate: GenerateFlags) -> Loaded:
    """The requests of a file in a public format, or made up ones."""
    if path is not None:
        return load(path, format or detect(path))
    return Loaded(str(generate.generate), generate.jobs(), 0)


def faster(jobs: Sequence[Job], load: float) -> list[Job]:
    """The same requests, `load` times as close together."""
    return [msgspec.structs.replace(job, arrival_s=job.arrival_s / load) for job in jobs]


def variant(source: Source, settings: Mapping[str, Any]) -> tuple[EngineConfig, Capacity]:
    """The configuration and capacity of `source` with these settings changed."""
    config = checked(msgspec.structs.replace(source.config, **settings))
    return config, _resized(source.capacity, config, settings)


def _capacity(config: EngineConfig) -> Capacity:
    block_bytes = config.block_size * KV_TOKEN_BYTES
    num_host_blocks = config.num_host_blocks
    if num_host_blocks is None:
        num_host_blocks = int(config.kv_offloading_size * (1 << 30)) // block_bytes
    return Capacity(
        device="simulated",
        num_device_blocks=config.num_device_blocks or NUM_BLOCKS,
        num_host_blocks=num_host_blocks,
        block_size=config.block_size,
        block_bytes=block_bytes,
        vocab_size=2**31 - 1,
        max_model_len=config.max_model_len or MAX_MODEL_LEN,
    )


def _resized(capacity: Capacity, config: EngineConfig, settings: Mapping[str, Any]) -> Capacity:
    """`capacity` where `settings` change it. Other blocks hold other numbers of tokens: the bytes stay."""
    block_bytes = capacity.block_bytes * config.block_size // capacity.block_size
    changes: dict[str, Any] = {"block_size": config.block_size, "block_bytes": block_bytes}
    if "block_size" in settings and config.block_size != capacity.block_size:
        for name in ("num_device_blocks", "num_host_blocks"):
            changes[name] = getattr(capacity, name) * capacity.block_size // config.block_size
    for name in ("num_device_blocks", "num_host_blocks", "max_model_len"):
        if settings.get(name) is not None:
            changes[name] = settings[name]
    if settings.get("kv_offloading_size") is not None and settings.get("num_host_blocks") is None:
        changes["num_host_blocks"] = int(config.kv_offloading_size * (1 << 30)) // block_bytes
    return msgspec.structs.replace(capacity, **changes)


def _not_negative(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ValidationError(f"{_flag(name)} must not be below 0, got {value}", field=name, value=value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
