"""Steps in the C kernels: the whole step is one call, made without the GIL."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..logprobs import PROMPT_SLICE, prompt_parts
from ..models.config import ModelConfig
from ..models.rope import inverse_frequencies, rotation
from ..models.weights import DecoderWeights
from ..prompts import PromptRow, prompt_rows
from ..sampling import GREEDY_BELOW, Sampled, SamplingRow
from ..slots import Row
from . import library as lib
from .memory import huge_empty
from .packing import PackedWeights, rounded_up
from .plan import Plan, PoolShape, SharedGroups, make_plan
from .pool import KvPool
from .sampler import Sampler

_SPARE_ROWS = 32
"""Rows behind each buffer's last: kernels read whole blocks of rows."""

_MAX_QUERY_GROUP = 16
_MAX_HEAD_DIM = 256


def why_not(config: ModelConfig, level: int) -> str | None:
    """What of this model the kernels of `level` do not compute, in words; None if they compute it all."""
    if config.qkv_bias:
        return "the C kernels have no biases"
    if config.qk_norm:
        return "the C kernels have no normalised queries and keys"
    tile = 32 if lib.LEVELS[level] == "amx" else 16
    if config.head_dim % tile or config.head_dim > _MAX_HEAD_DIM:
        return f"the C kernels have no head_dim {config.head_dim}"
    if config.num_heads // config.num_kv_heads > _MAX_QUERY_GROUP:
        return f"the C kernels have at most {_MAX_QUERY_GROUP} query heads to a KV head"
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    for name, width in (
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("heads times head_dim", config.num_heads * config.head_dim),
        ("width of queries, keys and values", qkv),
    ):
        if width % 32:
            return f"the C kernels need a {name} that is a multiple of 32, not {width}"
    return None


class KernelPath:
    """Implements `ComputePath` for Llama and Mistral in float32 and bfloat16.

    `level` and the model must fit: see `level_for` and `why_not`. Takes the matrices out of `weights`.
    Buffers grow to the largest step seen and stay. Raises `MemoryError` if its threads cannot be started.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        level: int,
        config: ModelConfig,
        weights: DecoderWeights,
        pool: KvPool,
        *,
        num_threads: int,
    ) -> None:
        self._library = library
        self._config = config
        self._pool = pool
        self._threads = num_threads
        self._dtype = weights.embedding.dtype
        self._frequencies = inverse_frequencies(config)
        self._weights = PackedWeights(library, level, config, weights)
        self._padded_vocab = rounded_up(config.vocab_size, library.panel_columns(level, self._dtype is torch.bfloat16))
        self._model = _model_struct(level, config, self._weights, pool)
        self._buffers: dict[str, Tensor] = {}
        self._team: int | None = library.team_open(num_threads)
        if not self._team:
            raise MemoryError(f"no memory or no permission for {num_threads} compute threads")
        self._end_team = weakref.finalize(self, library.team_close, self._team)
        self._sampler = Sampler(library, level, self._team, num_threads=num_threads, vocab_size=config.vocab_size)
        self.description = f"{_LEVEL_NAMES[level]} kernels, {num_threads} thread{'s' * (num_threads > 1)}"
        self.seconds: dict[str, float] = dict.fromkeys(lib.PHASES, 0.0)

    def compute(
        self,
        rows: Sequence[Row],
        draws: Sequence[SamplingRow],
        shared: SharedGroups,
        *,
        before_draws: Callable[[], None] | None = None,
    ) -> Sampled:
        """See `ComputePath.compute`. Adds the time of each phase to `seconds`."""
        plan = make_plan(
            rows,
            shared,
            self._pool_shape(),
            vocab_size=self._config.vocab_size,
            query_group=self._config.num_heads // self._config.num_kv_heads,
        )
        asking = prompt_rows(rows)
        with torch.inference_mode():
            if asking:
                return self._compute_prompts(plan, asking, draws, before_draws)
            self._make_room(plan)
            # Only where nobody needs the logits themselves.
            if all(draw.is_plain and draw.params.temperature < GREEDY_BELOW and draw.params.logprobs is None for draw in draws):
                return self._compute_greedy(plan, len(draws))
            step = self._step_struct(plan)
            step.logits = self._address("logits")
            self._run(step)
            return self._sample(draws, before_draws)

    def _compute_greedy(self, plan: Plan, count: int) -> Sampled:
        tokens = np.zeros(count, dtype=np.int32)
        finite = np.zeros(count, dtype=np.uint8)
        best = np.empty((self._threads, count, 3), dtype=np.int32)
        step = self._step_struct(plan)
        step.logits = self._address("logits")
        step.tokens, step.finite, step.best = tokens.ctypes.data, finite.ctypes.data, best.ctypes.data
        self._run(step)
        return Sampled(tokens.tolist(), np.flatnonzero(finite == 0).tolist())

    def _compute_prompts(
        self, plan: Plan, asking: Sequence[PromptRow], draws: Sequence[SamplingRow], before_draws: Callable[[], None] | None
    ) -> Sampled:
        """Compute with the logits of prompts too, a slice at a time, and then those of the samples, a run at a time."""
        samples = plan.sample_at
        inside = [np.arange(one.token, one.token + len(one.targets), dtype=np.int32) for one in asking]
        wanted = np.sort(np.concatenate([samples, *inside]))  # no token is both: what a sample follows on ends its log
        self._make_room(plan)
        self._room("prompt logits", PROMPT_SLICE + _SPARE_ROWS, self._padded_vocab, torch.float32)
        step = self._step_struct(plan._replace(sample_at=wanted))
        self._run(step)
        place = dict(zip(wanted.tolist(), range(len(wanted)), strict=True))

        def logits(first: int, last: int) -> Tensor:
            self._head(step, place[first], last - first, "prompt logits", 0)
            return self._buffers["prompt logits"][: last - first, : self._config.vocab_size]

        prompts, failed = prompt_parts(asking, logits)
        done = 0
        for first, count in _runs([place[token] for token in samples.tolist()]):
            self._head(step, first, count, "logits", done)  # what it writes behind its rows the next one overwrites
            done += count
        return self._sample(draws, before_draws)._replace(prompts=prompts, failed_prompts=failed)

    def _head(self, step: Any, first: int, count: int, name: str, row: int) -> None:
        """Logits of samples [first, first + count) of a step that was run without, to buffer `name` from `row` on."""
        target, booked_s = self._address(name) + row * self._padded_vocab * 4, step.seconds[_HEAD]
        self._library.run_head(ctypes.byref(self._model), ctypes.byref(step), first, count, target, self._team)
        self.seconds["head"] += step.seconds[_HEAD] - booked_s

    def _run(self, step: Any) -> None:
        self._library.run_step(ctypes.byref(self._model), ctypes.byref(step), self._team)
        for name, seconds in zip(lib.PHASES, step.seconds, strict=True):
            self.seconds[name] += seconds

    def _sample(self, draws: Sequence[SamplingRow], before_draws: Callable[[], None] | None) -> Sampled:
        if before_draws is not None:
            before_draws()
        return self._sampler.sample(self.logits(len(draws)), draws) if draws else Sampled([], [])

    def logits(self, count: int) -> Tensor:
        """The logits of the last step's first `count` samples, float32 [count, vocab_size]; overwritten by the next step.

        There are none after a step whose draws were all greedy, of plain logits and without logprobs.
        """
        return self._buffers["logits"][:count, : self._config.vocab_size]

    def close(self) -> None:
        """End the threads and let go of the memory. May be called twice."""
        self._end_team()
        self._team = None
        self._buffers.clear()

    def _pool_shape(self) -> PoolShape:
        blocks = self._pool.blocks
        return PoolShape(blocks.shape[0], self._pool.block_size, blocks.stride(0), blocks.stride(3))

    def _angles(self, plan: Plan) -> Tensor:
        """float32 [tokens, head_dim]: cosines, then sines."""
        cos, sin = rotation(torch.from_numpy(plan.positions), self._frequencies, torch.float32)
        return torch.cat((cos, sin), dim=-1).contiguous()

    def _step_struct(self, plan: Plan) -> Any:
        """The step without what its results are for. It keeps what it points at."""
        angles = self._angles(plan)
        step = lib.Step(
            num_tokens=len(plan.token_ids),
            num_decodes=len(plan.decodes),
            num_chunks=len(plan.chunks),
            num_groups=len(plan.groups),
            num_samples=len(plan.sample_at),
            rotation=angles.data_ptr(),
            state=self._address("state") if len(plan.groups) else None,
            **{name: getattr(plan, name).ctypes.data for name in _ARRAYS},
        )
        step.kept = (plan, angles)
        return step

    def _address(self, name: str) -> int:
        return self._buffers[name].data_ptr()

    def _make_room(self, plan: Plan) -> None:
        config, model = self._config, self._model
        heads = config.num_heads * config.head_dim
        num_tokens = len(plan.token_ids)
        for name, width in (
            ("x", config.hidden_size),
            ("normed", config.hidden_size),
            ("qkv", heads + 2 * config.num_kv_heads * config.head_dim),
            ("attended", heads),
            ("inner", config.intermediate_size),
        ):
            setattr(model, name, self._room(name, num_tokens + _SPARE_ROWS, width, self._dtype))
        self._room("logits", len(plan.sample_at) + _SPARE_ROWS, self._padded_vocab, torch.float32)
        if len(plan.groups):
            self._room("state", len(plan.decodes) * config.num_heads, config.head_dim + lib.STATE_EXTRA, torch.float32)
        depth = max(config.hidden_size, config.intermediate_size, heads)
        model.scratch_bytes = self._library.scratch_bytes(
            config.num_heads, config.num_kv_heads, config.head_dim, plan.longest_run, depth
        )
        model.scratch = self._room("scratch", self._threads, model.scratch_bytes, torch.uint8)

    def _room(self, name: str, rows: int, width: int, dtype: torch.dtype) -> int:
        """Address of buffer `name`, which has at least `rows` x `width` elements."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < rows * width:
            # Zeroed: what was never written is read where a block of rows is not full, and must be nothing strange.
            buffer = self._buffers[name] = huge_empty([rows + rows // 4, width], dtype).zero_()
        return buffer.data_ptr()


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Rising numbers as runs without a gap: (first, count)."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and sum(runs[-1]) == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return runs


_HEAD = lib.PHASES.index("head")
_LEVEL_NAMES = ("portable", "AVX2", "AVX-512", "AMX")
_ARRAYS = ("token_ids", "slots", "tables", "decodes", "chunks", "groups", "members", "sample_at")


def _model_struct(level: int, config: ModelConfig, weights: PackedWeights, pool: KvPool) -> Any:
    blocks = pool.blocks
    return lib.Model(
        level=level,
        is_bf16=blocks.dtype is torch.bfloat16,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        layers=ctypes.addressof(weights.layers),
        embedding=weights.embedding.data_ptr(),
        final_norm=weights.final_norm.data_ptr(),
        lm_head=weights.lm_head,
        pool=blocks.data_ptr(),
        block_size=pool.block_size,
        block_stride=blocks.stride(0),
        layer_stride=blocks.stride(1),
        value_offset=blocks.stride(2),
        token_stride=blocks.stride(3),
    )
