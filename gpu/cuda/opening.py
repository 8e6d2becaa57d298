"""Opens a GPU: model, pools, the ways to compute, and how large everything may be - found out by running it once."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from ...protocol.capacity import Capacity
from ...protocol.config import EngineConfig
from ...protocol.errors import ConfigError
from ..models.config import ModelConfig, load_model_config
from ..models.weights import DecoderWeights, load_weights
from ..nvml import DeviceWatch, open_watch
from ..structured import Grammars
from .attention.choice import Choice, choose_attention, open_attention
from .attention.needs import AttentionNeeds
from .available import ordinal_of, why_no_cuda
from .decoder import GpuDecoder
from .draws import DeviceSampler, TorchSampler, TritonSampler
from .executor import GpuExecutor, Parts
from .glue import Glue, TorchGlue
from .graphs import DecodeGraphs, captured_sizes
from .matrices import LayerMatrices, layer_matrices
from .plan import PoolShape
from .pools import DevicePool, PinnedPool
from .profile import PROFILE_BLOCKS, run_largest_step
from .runtime import DeviceMemory, Runtime
from .sizing import num_device_blocks, num_host_blocks
from .stepping import Limits, StepRunner
from .torch_runtime import TorchRuntime

_log = logging.getLogger(__name__)


class LoadWeights(Protocol):
    """What `load_weights` is."""

    def __call__(self, directory: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> DecoderWeights: ...


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DeviceFacts(NamedTuple):
    """What is known of a device before anything runs on it."""

    name: str
    capability: tuple[int, int] | None
    """Compute capability, major and minor; None for a device that is no GPU."""
    num_multiprocessors: int
    has_triton: bool


class Computing(NamedTuple):
    """The ways to compute that were chosen, and the model on the device."""

    model: ModelConfig
    weights: DecoderWeights
    layers: list[LayerMatrices]
    glue: Glue
    needs: AttentionNeeds
    choice: Choice
    limits: Limits
    facts: DeviceFacts

    @property
    def weights_bytes(self) -> int:
        """What the model takes on the device."""
        return self.weights.num_bytes


def open_cuda(config: EngineConfig, model_dir: Path) -> GpuExecutor:
    """Open the GPU that `config.device` names. Slow: loads the weights, runs the model, captures graphs.

    Raises `ConfigError` naming the key for a setting that this device cannot satisfy, `ModelLoadError` for a model that
    cannot be loaded.
    """
    ordinal = ordinal_of(config.device)
    if (reason := why_no_cuda(ordinal)) is not None:
        raise ConfigError(f"device {config.device}: {reason}", key="device")
    device = torch.device("cuda", ordinal)
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    uuid = str(properties.uuid) if hasattr(properties, "uuid") else None
    watch = open_watch(ordinal, visible=os.environ.get("CUDA_VISIBLE_DEVICES"), uuid=uuid)
    return open_on(TorchRuntime(device), config, model_dir, facts=facts_of(device), watch=watch)


def facts_of(device: torch.device) -> DeviceFacts:
    """What CUDA says of a GPU."""
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        name=properties.name,
        capability=(properties.major, properties.minor),
        num_multiprocessors=properties.multi_processor_count,
        has_triton=find_spec("triton") is not None,
    )


def open_on(
    runtime: Runtime,
    config: EngineConfig,
    model_dir: Path,
    *,
    facts: DeviceFacts,
    watch: DeviceWatch | None = None,
    load: LoadWeights = load_weights,
) -> GpuExecutor:
    """Open the device of `runtime`; see `open_cuda`. `load` brings the weights, where they are not in `model_dir`."""
    computing = _load(runtime, config, model_dir, facts, load)
    grammars = Grammars(
        model_dir / "tokenizer.json", vocab_size=computing.model.vocab_size, eos_token_ids=computing.model.eos_token_ids
    )
    blocks = _num_blocks(runtime, config, computing, watch)
    pool = _pool(runtime, config, computing, num_blocks=blocks)
    host = PinnedPool(pool, runtime, num_blocks=num_host_blocks(config, pool.block_bytes))
    runner = _runner(runtime, computing, pool)
    runtime.compute.launch(runner.warm_up)
    runtime.compute.record().synchronize()
    graphs = _graphs(runtime, config, computing, runner, captured_sizes(computing.limits.num_rows))
    parts = Parts(
        runtime=runtime,
        pool=pool,
        host=host,
        runner=runner,
        graphs=graphs,
        grammars=grammars,
        capacity=_capacity(config, computing, pool, host, name=facts.name),
        watch=None if watch is None else watch.poll,
        close_watch=_nothing if watch is None else watch.close,
    )
    return GpuExecutor(parts)


def _load(runtime: Runtime, config: EngineConfig, model_dir: Path, facts: DeviceFacts, load: LoadWeights) -> Computing:
    model = load_model_config(model_dir, max_model_len=config.max_model_len)
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the model's {model.max_position_embeddings}", key="max_model_len"
        )
    dtype = _dtype(config, facts)
    needs = AttentionNeeds(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        dtype=dtype,
        kv_dtype=dtype,
        device=runtime.device,
        capability=facts.capability,
    )
    choice = choose_attention(config.attention_backend, needs)
    _log.info(f"attention: {choice}")
    weights = load(model_dir, model, dtype=dtype, device=runtime.device)
    return Computing(
        model=model,
        weights=weights,
        layers=layer_matrices(weights),
        glue=_open_glue(facts),
        needs=needs,
        choice=choice,
        limits=_limits(config, max_model_len),
        facts=facts,
    )


def _limits(config: EngineConfig, max_model_len: int) -> Limits:
    """The largest step that the scheduler may send: its budget is for prefills, and decodes get their tokens in any case.

    Where chunks are off, one prefill longer than the budget runs whole, beside the decodes.
    """
    num_rows = config.running_limit
    num_tokens = max(config.token_budget, num_rows)
    if not config.enable_chunked_prefill:
        num_tokens = max(num_tokens, max_model_len + num_rows - 1)
    return Limits(num_tokens, num_rows, -(-max_model_len // config.block_size))


def _num_blocks(runtime: Runtime, config: EngineConfig, computing: Computing, watch: DeviceWatch | None) -> int:
    """Run the largest step and the largest captured one, and see what is left."""
    runtime.forget_peak()
    pool = _pool(runtime, config, computing, num_blocks=PROFILE_BLOCKS)
    runner = _runner(runtime, computing, pool)
    shape = PoolShape(PROFILE_BLOCKS, config.block_size, computing.model.vocab_size)
    run_largest_step(runner, runtime, shape)
    graphs = _graphs(runtime, config, computing, runner, captured_sizes(computing.limits.num_rows)[-1:])
    memory = _memory(runtime, watch)
    block_bytes = pool.block_bytes
    del graphs, runner, pool
    runtime.forget_peak()
    return num_device_blocks(config, memory, block_bytes)


def _memory(runtime: Runtime, watch: DeviceWatch | None) -> DeviceMemory:
    """The device's memory, or the slice's where it is cut into some."""
    memory = runtime.memory()
    told = None if watch is None else watch.memory()
    if told is None or told.total_bytes >= memory.total_bytes:
        return memory
    return memory._replace(total_bytes=told.total_bytes, free_bytes=min(memory.free_bytes, told.total_bytes - told.used_bytes))


def _pool(runtime: Runtime, config: EngineConfig, computing: Computing, *, num_blocks: int) -> DevicePool:
    return DevicePool(
        computing.model,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=computing.needs.kv_dtype,
        device=runtime.device,
    )


def _runner(runtime: Runtime, computing: Computing, pool: DevicePool) -> StepRunner:
    model, limits = computing.model, computing.limits
    max_positions = limits.table_width * pool.block_size
    attention = open_attention(
        computing.choice, computing.needs, max_rows=limits.num_rows, num_sms=computing.facts.num_multiprocessors
    )
    return StepRunner(
        runtime,
        GpuDecoder(model, computing.weights, computing.layers, computing.glue, max_positions=max_positions),
        pool,
        attention=attention,
        glue=computing.glue,
        sampler=_open_sampler(computing, runtime.device),
        limits=limits,
    )


def _graphs(
    runtime: Runtime, config: EngineConfig, computing: Computing, runner: StepRunner, sizes: list[int]
) -> DecodeGraphs | None:
    if config.enforce_eager or not computing.facts.has_triton or not runner.attention.can_be_captured:
        return None  # what torch does in place of the kernels waits for the device
    longest = computing.limits.table_width * config.block_size
    return DecodeGraphs(runtime, sizes, lambda num_rows: runner.launch_decode(num_rows, longest))


def _open_glue(facts: DeviceFacts) -> Glue:
    if not facts.has_triton:
        return TorchGlue()
    from .triton_glue import TritonGlue

    return TritonGlue()


def _open_sampler(computing: Computing, device: torch.device) -> DeviceSampler:
    if not computing.facts.has_triton:
        return TorchSampler()
    return TritonSampler(max_rows=computing.limits.num_rows, vocab_size=computing.model.vocab_size, device=device)


def _dtype(config: EngineConfig, facts: DeviceFacts) -> torch.dtype:
    """auto: bfloat16 where the GPU multiplies it, which all do since compute capability 8.0, else float16."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    return torch.bfloat16 if facts.capability is None or facts.capability >= (8, 0) else torch.float16


def _capacity(config: EngineConfig, computing: Computing, pool: DevicePool, host: PinnedPool, *, name: str) -> Capacity:
    dtype = str(computing.needs.dtype).removeprefix("torch.")
    out_rate, in_rate = host.measure()
    return Capacity(
        device=f"{name} ({dtype}, attention {computing.choice})",
        num_device_blocks=pool.blocks.shape[0],
        num_host_blocks=host.blocks.shape[0],
        block_size=config.block_size,
        block_bytes=pool.block_bytes,
        vocab_size=computing.model.vocab_size,
        max_model_len=config.max_model_len or computing.model.max_position_embeddings,
        weights_bytes=computing.weights_bytes,
        copy_out_rate=out_rate,
        copy_in_rate=in_rate,
    )


def _nothing() -> None:
    """There is no watch to close."""
