"""Opens a GPU: model, pools, the ways to compute, and how large everything may be - found out by running it once."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from ...protocol.capacity import Capacity
from ...protocol.config import EngineConfig
from ...protocol.errors import ConfigError
from ..models.config import ModelConfig, load_model_config
from ..models.weights import DecoderWeights, LayerWeights, load_converted
from ..nvml import DeviceWatch, open_watch
from ..structured import Grammars
from .attention.choice import Choice, choose_attention, open_attention
from .attention.needs import AttentionNeeds
from .available import ordinal_of, why_no_cuda
from .calibration import measure_scales, prompt_len
from .decoder import GpuDecoder
from .draws import DeviceSampler, TorchSampler, TritonSampler
from .executor import GpuExecutor, Parts
from .fp8 import FP8, Fp8Matrix, fp8_maker, why_no_fp8
from .glue import Glue, TorchGlue
from .graphs import DecodeGraphs, captured_sizes
from .matrices import Dense, LayerMatrices, MakeMatrix, layer_matrices
from .plan import PoolShape
from .pools import DevicePool, KvScales, PinnedPool
from .profile import PROFILE_BLOCKS, run_largest_step
from .runtime import DeviceMemory, Runtime
from .sizing import num_device_blocks, num_host_blocks
from .stepping import Limits, StepRunner
from .torch_runtime import TorchRuntime


class LoadModel(Protocol):
    """What `load_converted` is."""

    def __call__(
        self,
        directory: Path,
        config: ModelConfig,
        *,
        convert: Callable[[LayerWeights], LayerMatrices],
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[DecoderWeights, list[LayerMatrices]]: ...


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DeviceFacts(NamedTuple):
    """What is known of a device before anything runs on it."""

    name: str
    capability: tuple[int, int] | None
    """Compute capability, major and minor; None for a device that is no GPU."""
    num_multiprocessors: int
    has_triton: bool


class Computing(NamedTuple):
    """The ways to compute that were chosen, and the model on the device. `weights` has no layers: they are in `layers`."""

    model: ModelConfig
    weights: DecoderWeights
    layers: list[LayerMatrices]
    glue: Glue
    needs: AttentionNeeds
    choice: Choice
    limits: Limits
    facts: DeviceFacts
    kv_scales: list[KvScales] | None = None

    @property
    def weights_bytes(self) -> int:
        """What the model takes on the device."""
        return self.weights.num_bytes + sum(layer.num_bytes for layer in self.layers)

    @property
    def dtypes(self) -> str:
        """What it computes in, in words: "bfloat16, fp8 weights, fp8 KV"."""
        words = [str(self.needs.dtype).removeprefix("torch.")]
        if any(isinstance(layer.qkv, Fp8Matrix) for layer in self.layers):
            words.append("fp8 weights")
        if self.needs.kv_dtype == FP8:
            words.append("fp8 KV")
        return ", ".join(words)


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
    if config.dtype == "float32":
        torch.set_float32_matmul_precision("highest")  # who asks for it wants it, whatever the process is set to
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
    load: LoadModel = load_converted,
) -> GpuExecutor:
    """Open the device of `runtime`; see `open_cuda`. If that fails, what was taken is given back, `runtime` included.

    `load` brings the weights, where they are not in `model_dir`.
    """
    with ExitStack() as undo:
        undo.callback(runtime.close)
        close_watch = _nothing if watch is None else watch.close
        undo.callback(close_watch)
        computing = _load(runtime, config, model_dir, facts, load)
        executor = GpuExecutor(_parts(runtime, config, computing, model_dir=model_dir, watch=watch, undo=undo))
        undo.pop_all()
    return executor


def _parts(
    runtime: Runtime,
    config: EngineConfig,
    computing: Computing,
    *,
    model_dir: Path,
    watch: DeviceWatch | None,
    undo: ExitStack,
) -> Parts:
    if computing.needs.kv_dtype != computing.needs.dtype:
        computing = computing._replace(kv_scales=_kv_scales(runtime, config, computing))
    grammars = Grammars(
        model_dir / "tokenizer.json", vocab_size=computing.model.vocab_size, eos_token_ids=computing.model.eos_token_ids
    )
    undo.callback(grammars.close)
    blocks = _num_blocks(runtime, config, computing, watch)
    pool = _pool(runtime, config, computing, num_blocks=blocks)
    host = _host_pool(runtime, config, pool)
    runner = _runner(runtime, computing, pool)
    runtime.synchronize()  # what was made was filled on another stream
    runtime.compute.launch(runner.warm_up)
    runtime.compute.record().synchronize()
    graphs = _graphs(runtime, config, computing, runner, captured_sizes(computing.limits.num_rows))
    return Parts(
        runtime=runtime,
        pool=pool,
        host=host,
        runner=runner,
        graphs=graphs,
        grammars=grammars,
        capacity=_capacity(config, computing, pool, host, name=computing.facts.name),
        watch=None if watch is None else watch.poll,
        close_watch=_nothing if watch is None else watch.close,
    )


def _host_pool(runtime: Runtime, config: EngineConfig, pool: DevicePool) -> PinnedPool:
    try:
        return PinnedPool(pool, runtime, num_blocks=num_host_blocks(config, pool.block_bytes))
    except MemoryError as error:
        key = "kv_offloading_size" if config.num_host_blocks is None else "num_host_blocks"
        raise ConfigError(f"{key} {getattr(config, key)}: {error}", key=key) from error


def _load(runtime: Runtime, config: EngineConfig, model_dir: Path, facts: DeviceFacts, load: LoadModel) -> Computing:
    model = load_model_config(model_dir, max_model_len=config.max_model_len)
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the model's {model.max_position_embeddings}", key="max_model_len"
        )
    dtype = _dtype(config, facts)
    _refuse_fp8(config, facts)
    needs = AttentionNeeds(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        dtype=dtype,
        kv_dtype=dtype if config.kv_cache_dtype == "auto" else FP8,
        device=runtime.device,
        capability=facts.capability,
    )
    choice = choose_attention(config.attention_backend, needs)
    weights, layers = load(
        model_dir, model, convert=partial(layer_matrices, make=_make_matrix(config, facts)), dtype=dtype, device=runtime.device
    )
    return Computing(
        model=model,
        weights=weights,
        layers=layers,
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
    runtime.synchronize()
    shape = PoolShape(PROFILE_BLOCKS, config.block_size, computing.model.vocab_size)
    run_largest_step(runner, runtime, shape)
    memory = _memory(runtime, watch)
    runtime.forget_peak()
    graph_bytes = _graph_bytes(runtime, config, computing, runner)
    block_bytes = pool.block_bytes
    del runner, pool
    runtime.forget_peak()
    return num_device_blocks(config, memory._replace(peak_bytes=memory.peak_bytes + graph_bytes), block_bytes)


def _graph_bytes(runtime: Runtime, config: EngineConfig, computing: Computing, runner: StepRunner) -> int:
    """What captured steps will take: the largest one with the memory that all share, and as much as the next for each other."""
    sizes = captured_sizes(computing.limits.num_rows)
    free = [runtime.memory().free_bytes]
    kept = []
    for size in sizes[-1:-3:-1]:
        kept.append(_graphs(runtime, config, computing, runner, [size]))
        free.append(runtime.memory().free_bytes)
    taken = [max(0, before - after) for before, after in pairwise(free)]
    return sum(taken) + taken[-1] * max(0, len(sizes) - 2)


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
        scales=computing.kv_scales,
    )


def _kv_scales(runtime: Runtime, config: EngineConfig, computing: Computing) -> list[KvScales]:
    """Run the model on a pool of its own dtype, to see what a float8 one has to hold."""
    computing = computing._replace(needs=replace(computing.needs, kv_dtype=computing.needs.dtype))
    num_blocks = -(-prompt_len(computing.limits, config.block_size) // config.block_size)
    pool = _pool(runtime, config, computing, num_blocks=num_blocks)
    runner = _runner(runtime, computing, pool)
    runtime.synchronize()  # what was made was filled on another stream
    return measure_scales(runtime, runner, pool, vocab_size=computing.model.vocab_size)


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


def _refuse_fp8(config: EngineConfig, facts: DeviceFacts) -> None:
    for key in ("quantization", "kv_cache_dtype"):
        if getattr(config, key) == "fp8" and (reason := why_no_fp8(facts.capability)) is not None:
            raise ConfigError(f"{key}: {reason}", key=key)


def _make_matrix(config: EngineConfig, facts: DeviceFacts) -> MakeMatrix:
    if config.quantization is None:
        return Dense
    return fp8_maker(is_gpu=facts.capability is not None, has_triton=facts.has_triton)


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
    out_rate, in_rate = host.measure()
    return Capacity(
        device=f"{name} ({computing.dtypes}, attention {computing.choice})",
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
