"""Milliseconds of a model step on the CPU, torch against the C kernels: `scripts/bench cpu-step`.

Both compute the same steps in turn in one process, so the ratio holds on a busy machine where the times do not; with
`--cpu-time` what other processes take is left out as well. `floor` is what reading the weights alone takes at the
bandwidth measured here, in the kernels' packed form. Pin it: `OMP_NUM_THREADS=1 taskset -c 1 scripts/bench cpu-step`.

With `--parts`: where the kernels spend their time, each part in its fastest repetition, since another process that takes
the core for a moment lengthens one part of one step. A part's floor is the larger of its bytes from or to memory
(weights once, keys and values) at that bandwidth, and its floating-point operations at the fastest rate a large matrix
product of torch's or one of ours in the cache was seen to reach on one thread. `python` is all that is not in the C call.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from repertory.actors.scheduling.step_time import attended
from repertory.gpu.cpu.kernel_path import KernelPath
from repertory.gpu.cpu.library import PHASES, Linear, level_for, open_library
from repertory.gpu.cpu.machine import compute_dtype
from repertory.gpu.cpu.memory import huge_empty, keep_freed_memory
from repertory.gpu.cpu.paths import ComputePath
from repertory.gpu.cpu.plan import SharedGroups
from repertory.gpu.cpu.pool import KvPool
from repertory.gpu.cpu.torch_path import TorchPath
from repertory.gpu.models.config import ModelConfig, load_model_config
from repertory.gpu.models.decoder import Decoder
from repertory.gpu.models.source import resolve_model
from repertory.gpu.models.weights import load_weights
from repertory.gpu.sampling import SamplingRow
from repertory.gpu.slots import Row, Slot
from repertory.protocol.ids import BlockId, SequenceId
from repertory.protocol.messages import NewRow
from repertory.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, seed=0)
BLOCK_SIZE = 16
CONTEXT = 256
PREFIX, OWN = 1024, 48
NUM_BLOCKS = 2600
PARTS_OF = (f"decode 1 x {CONTEXT}", f"decode 64 x {CONTEXT}", "prefill 512")
"""Steps whose parts are told."""


class Work(NamedTuple):
    """A step to measure."""

    name: str
    rows: list[Row]
    shared: SharedGroups = ()


def main() -> None:
    """Print a table of step times."""
    parser = argparse.ArgumentParser(prog="scripts/bench cpu-step", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto", help="float32 or bfloat16 (default: what the engine would take)")
    parser.add_argument("--level", default="auto", help="instruction set of the kernels: amx, avx512, avx2, portable")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cpu-time", action="store_true", help="count only the time this thread runs (one thread)")
    parser.add_argument("--parts", action="store_true", help="where the kernels spend their time, of fewer steps")
    arguments = parser.parse_args()
    if arguments.parts and arguments.cpu_time:
        parser.error("--parts: the kernels take the time of day for their parts, so --cpu-time does not go with it")
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    bench = Bench(arguments.model, arguments.dtype, arguments.level, arguments.threads)
    bandwidth = read_bandwidth()
    floor_ms = bench.weights_bytes / bandwidth * 1e3
    print(f"{bench.kernels.description}; reads {bandwidth / 1e9:.1f} GB/s; weights {bench.weights_bytes / 1e6:.0f} MB")
    peak = bench.peak_flops() if arguments.parts else 1.0
    if arguments.parts:
        print(f"matrix products reach {peak / 1e12:.2f} TFLOP/s")
    print(f"{'step':<28} {'torch ms':>9} {'kernels ms':>11} {'best ms':>9} {'ratio':>6} {'floor ms':>9}")
    for work in bench.works():
        if arguments.parts and work.name not in PARTS_OF:
            continue
        torch_s, kernels_s, parts = bench.measure(work, repeats=arguments.repeats, clock=clock)
        medians = statistics.median(torch_s) * 1e3, statistics.median(kernels_s) * 1e3
        figures = f"{medians[0]:>9.1f} {medians[1]:>11.1f} {min(kernels_s) * 1e3:>9.1f} {medians[0] / medians[1]:>6.2f}"
        print(f"{work.name:<28} {figures} {floor_ms:>9.1f}", flush=True)
        if arguments.parts:
            costs = costs_of(bench.config, work.rows, element=bench.pool.blocks.element_size())
            print_parts(parts, costs, bandwidth=bandwidth, peak=peak)


class Cost(NamedTuple):
    """What a part cannot do without: bytes from or to memory, and floating-point operations."""

    num_bytes: int
    flops: int


def costs_of(config: ModelConfig, rows: list[Row], *, element: int) -> dict[str, Cost]:
    """Costs of a step's parts, by phase; those that work in the cache have none. The last layer goes on with samples alone."""
    tokens, samples = sum(row.end - row.start for row in rows), sum(row.samples for row in rows)
    heads, kv = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    layers, hidden, inner = config.num_layers, config.hidden_size, config.intermediate_size

    def linear(n: int, k: int, count: int, times: int = 1) -> Cost:
        return Cost(n * k * element * times, 2 * n * k * count)

    def attention(some: list[Row]) -> Cost:
        pairs = sum(attended(row.start, row.end - row.start) for row in some)
        return Cost(sum(row.end for row in some) * kv * element * layers, 4 * heads * pairs * layers)

    after = tokens * (layers - 1) + samples
    return {
        "qkv": linear(heads + kv, hidden, tokens * layers, layers),
        "rope + KV": Cost(tokens * kv * element * layers, 0),
        "decodes": attention([row for row in rows if row.end - row.start == 1]),
        "chunks": attention([row for row in rows if row.end - row.start > 1]),
        "attention out": linear(hidden, heads, after, layers),
        "gate up": linear(2 * inner, hidden, after, layers),
        "down": linear(hidden, inner, after, layers),
        "head": linear(config.vocab_size, hidden, samples),
    }


def print_parts(parts: dict[str, float], costs: dict[str, Cost], *, bandwidth: float, peak: float) -> None:
    """A line for each part of a step that took any time, and their sum."""
    whole_s = sum(parts.values())
    print(f"    {'part':<14} {'ms':>7} {'share':>6} {'floor ms':>9} {'ms / floor':>11}")
    for name, seconds in {**parts, "sum": whole_s}.items():
        cost = costs.get(name, Cost(0, 0))
        read_s, compute_s = cost.num_bytes / bandwidth, cost.flops / peak
        floor_s = max(read_s, compute_s)
        if floor_s and seconds:
            floor = f"{floor_s * 1e3:>9.2f} {seconds / floor_s:>11.2f} {'memory' if read_s > compute_s else 'compute'}"
        else:
            floor = ""
        if seconds:
            print(f"    {name:<14} {seconds * 1e3:>7.2f} {seconds / whole_s:>6.1%} {floor}".rstrip())


class Bench:
    """Both paths over one pool."""

    def __init__(self, model: str, dtype_name: str, level: str, threads: int) -> None:
        directory = resolve_model(model)
        self.config = config = load_model_config(directory)
        dtype = compute_dtype(dtype_name)
        self._library = library = open_library()
        self._level = level_for(library, dtype, level)
        cpu = torch.device("cpu")
        weights = load_weights(directory, config, dtype=dtype, device=cpu)
        self.weights_bytes = weights.num_bytes
        self.pool = KvPool(config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype)
        self.pool.blocks.zero_()
        decoder = Decoder(config, load_weights(directory, config, dtype=dtype, device=cpu))
        self.torch = TorchPath(decoder, self.pool, description="torch")
        self.kernels = KernelPath(library, self._level, config, weights, self.pool, num_threads=threads)
        self._threads = threads
        self._random = random.Random(0)
        self._vocab_size = config.vocab_size
        self._free = self._random.sample(range(NUM_BLOCKS), NUM_BLOCKS)

    def works(self) -> list[Work]:
        """The steps, their contexts computed as far as they read them. The last ones share a prefix."""
        prefills = [Work(f"prefill {n}", [Row(self._slot(n), 0, n, 1)]) for n in (512, 2048)]
        slots = [self._slot(CONTEXT) for _ in range(64)]
        decodes = [
            Work(f"decode {n} x {CONTEXT}", [Row(slot, CONTEXT - 1, CONTEXT, 1) for slot in slots[:n]]) for n in (1, 8, 32, 64)
        ]
        prefix = self._slot(PREFIX)
        sharing = [self._slot(PREFIX + OWN, prefix) for _ in range(32)]
        rows = [Row(slot, PREFIX + OWN - 1, PREFIX + OWN, 1) for slot in sharing]
        name = f"decode 32 x ({PREFIX} + {OWN})"
        groups: SharedGroups = [(list(range(32)), PREFIX // BLOCK_SIZE)]
        return [*prefills, *decodes, Work(name, rows), Work(f"{name} shared", rows, groups)]

    def measure(
        self, work: Work, *, repeats: int, clock: Callable[[], float]
    ) -> tuple[list[float], list[float], dict[str, float]]:
        """Seconds of each repetition in torch and in the kernels, in turn, and each part of the kernels' at its fastest."""
        found: tuple[list[float], list[float]] = ([], [])
        parts: list[dict[str, float]] = []
        for _ in range(repeats):
            paths: tuple[ComputePath, ComputePath] = (self.torch, self.kernels)
            for path, times in zip(paths, found, strict=True):
                self.kernels.seconds = dict.fromkeys(PHASES, 0.0)
                times.append(self._timed(path, work, clock))
            parts.append({**self.kernels.seconds, "python": found[1][-1] - sum(self.kernels.seconds.values())})
        return *found, {name: min(part[name] for part in parts) for name in parts[0]}

    def peak_flops(self) -> float:
        """Operations a second of matrix products on one thread: the best of torch's and of ours, weights in the cache."""
        dtype, size, small = self.pool.blocks.dtype, 1024, 512
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        x, weights, y = (torch.zeros(small, small, dtype=dtype) for _ in range(3))
        scratch = huge_empty([1 << 21], torch.int64)
        call = Linear(x.data_ptr(), small, small, weights.data_ptr(), small, small, y.data_ptr(), small, 0)
        ours = partial(self._library.run_linear, self._level, dtype is torch.bfloat16, ctypes.byref(call), scratch.data_ptr())
        torch.set_num_threads(1)
        rates = [2 * size**3 / best_of(lambda: torch.mm(a, b.T)), 2 * small**3 / best_of(ours)]
        torch.set_num_threads(self._threads)
        return max(rates)

    def _timed(self, path: ComputePath, work: Work, clock: Callable[[], float]) -> float:
        draws = [SamplingRow(GREEDY, 0, 0) for row in work.rows if row.samples]
        start = clock()
        path.compute(work.rows, draws, work.shared)
        return clock() - start

    def _slot(self, tokens: int, prefix: Slot | None = None) -> Slot:
        """A sequence of random tokens on scattered blocks, those of `prefix` in front. Its KV may be anything finite."""
        ids = self._random.choices(range(self._vocab_size), k=tokens)
        blocks = list(prefix.block_table) if prefix else []
        blocks += [BlockId(self._free.pop()) for _ in range(-(-tokens // BLOCK_SIZE) - len(blocks))]
        return Slot(NewRow(SequenceId(0), ids, tokens, GREEDY, blocks))


def read_bandwidth() -> float:
    """Bytes a second at which one thread reads memory on huge pages: the best of a few."""
    memory = huge_empty([1 << 25], torch.int64).zero_()
    library = open_library()
    return memory.nbytes / best_of(lambda: library.read_memory(memory.data_ptr(), memory.numel()))


def best_of(run: Callable[[], object], times: int = 7) -> float:
    """Seconds this thread took at the fastest of some runs."""
    best = float("inf")
    for _ in range(times):
        start = time.thread_time()
        run()
        best = min(best, time.thread_time() - start)
    return best


if __name__ == "__main__":
    main()
