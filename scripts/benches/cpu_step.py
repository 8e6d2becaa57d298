"""Milliseconds of a model step on the CPU, torch against the C kernels: `scripts/bench cpu-step`.

Both compute the same steps in turn in one process, so the ratio holds on a busy machine where the times do not; with
`--cpu-time` what other processes take is left out as well. `floor` is what reading the weights alone takes at the
bandwidth measured here, in the kernels' packed form. Pin it: `OMP_NUM_THREADS=1 taskset -c 1 scripts/bench cpu-step`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from repertory.gpu.cpu.kernel_path import KernelPath
from repertory.gpu.cpu.library import PHASES, level_for, open_library
from repertory.gpu.cpu.machine import compute_dtype
from repertory.gpu.cpu.memory import huge_empty, keep_freed_memory
from repertory.gpu.cpu.paths import ComputePath
from repertory.gpu.cpu.plan import SharedGroups
from repertory.gpu.cpu.pool import KvPool
from repertory.gpu.cpu.torch_path import TorchPath
from repertory.gpu.models.config import load_model_config
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
    parser.add_argument("--phases", action="store_true", help="where the kernels' best step spent its time")
    arguments = parser.parse_args()
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    bench = Bench(arguments.model, arguments.dtype, arguments.level, arguments.threads)
    bandwidth = read_bandwidth()
    floor_ms = bench.weights_bytes / bandwidth * 1e3
    print(f"{bench.kernels.description}; reads {bandwidth / 1e9:.1f} GB/s; weights {bench.weights_bytes / 1e6:.0f} MB")
    print(f"{'step':<28} {'torch ms':>9} {'kernels ms':>11} {'best ms':>9} {'ratio':>6} {'floor ms':>9}")
    for work in bench.works():
        torch_s, kernels_s, phases = bench.measure(work, repeats=arguments.repeats, clock=clock)
        medians = statistics.median(torch_s) * 1e3, statistics.median(kernels_s) * 1e3
        figures = f"{medians[0]:>9.1f} {medians[1]:>11.1f} {min(kernels_s) * 1e3:>9.1f} {medians[0] / medians[1]:>6.2f}"
        print(f"{work.name:<28} {figures} {floor_ms:>9.1f}", flush=True)
        if arguments.phases:
            print("    " + ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in phases.items() if seconds > 5e-5))


class Bench:
    """Both paths over one pool."""

    def __init__(self, model: str, dtype_name: str, level: str, threads: int) -> None:
        directory = resolve_model(model)
        config = load_model_config(directory)
        dtype = compute_dtype(dtype_name)
        library = open_library()
        cpu = torch.device("cpu")
        weights = load_weights(directory, config, dtype=dtype, device=cpu)
        self.weights_bytes = weights.num_bytes
        self.pool = KvPool(config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype)
        self.pool.blocks.zero_()
        decoder = Decoder(config, load_weights(directory, config, dtype=dtype, device=cpu))
        self.torch = TorchPath(decoder, self.pool, description="torch")
        self.kernels = KernelPath(library, level_for(library, dtype, level), config, weights, self.pool, num_threads=threads)
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
        """Seconds of each repetition in torch and in the kernels, in turn, and the phases of the kernels' best."""
        found: tuple[list[float], list[float]] = ([], [])
        best: dict[str, float] = {}
        for _ in range(repeats):
            for path, times in zip((self.torch, self.kernels), found, strict=True):
                self.kernels.seconds = dict.fromkeys(PHASES, 0.0)
                times.append(self._timed(path, work, clock))
            if found[1][-1] == min(found[1]):
                best = self.kernels.seconds
        return *found, best

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
    best = float("inf")
    for _ in range(7):
        start = time.thread_time()
        library.read_memory(memory.data_ptr(), memory.numel())
        best = min(best, time.thread_time() - start)
    return memory.nbytes / best


if __name__ == "__main__":
    main()
