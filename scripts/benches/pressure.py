"""What memory pressure costs under each preemption mode: `scripts/bench pressure`.

The same overload - more running requests than the KV pool holds - served under `recompute` (no host tier), `swap` and
`auto`. Lost seconds of the device are tokens computed again at the device's prefill rate, plus the time in which steps
waited for copies ("wait"), plus the time in which nothing ran because what could run was still being copied in ("still").

On the simulated device, with figures of an 8B model on a large GPU (128 KiB of KV and 40 us of prefill a token), time
is virtual and every run repeatable: there `auto` must lose at most 1.05 times what the better of the two others does at
2, 20 and 50 GB/s, and at most 0.6 times what the worse does at 2 and 50. With `--real` the CPU executor serves the demo
model; that is printed with the spread of 5 runs in turn and judged by nobody.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from repertory.actors.simulation.latency import LatencyModel
from repertory.actors.simulation.run import VirtualRun
from repertory.gpu.simulated import SimulatedExecutor
from repertory.protocol.config import EngineConfig, PreemptionMode
from repertory.protocol.ids import RequestId
from repertory.protocol.messages import Admit
from repertory.protocol.sampling import SamplingParams

MODES: tuple[PreemptionMode, ...] = ("recompute", "swap", "auto")
RATES = (2.0, 20.0, 50.0)
BLOCK_SIZE = 16
TOKEN_BYTES = 128 * 1024
TOKEN_S = 40e-6
STEP_S, ATTENDED_S, ROW_S = 6e-3, 5e-9, 20e-6
NUM_BLOCKS, NUM_HOST_BLOCKS = 1024, 8192
MOST_OF_BEST, MOST_OF_WORST = 1.05, 0.6
JUDGED_BY_WORST = (2.0, 50.0)


class Outcome(NamedTuple):
    """What one run under one mode came to. Times in seconds."""

    lost_s: float
    recomputed_s: float
    waited_s: float
    still_s: float
    tokens_per_s: float
    ttft_s: tuple[float, float]
    itl_s: tuple[float, float]
    num_bytes: int
    num_preemptions: dict[str, int]


def main() -> int:
    """Serve, print, judge."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench pressure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, help="default: 40, 24 with --real")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="of the copies, GB/s each way (default: 2 20 50)")
    parser.add_argument("--real", action="store_true", help="the CPU executor and the demo model, instead of virtual time")
    parser.add_argument("--repetitions", type=int, default=5, help="with --real: runs of each mode, in turn")
    options = parser.parse_args()
    if options.real:
        from repertory.scripts.benches.pressure_on_cpu import serve_for_real  # it brings torch

        return serve_for_real(options.requests or 24, options.seed, options.repetitions)
    runs = {
        (rate, mode): serve(mode, rate, options.requests or 40, options.seed)
        for rate, mode in track([(rate, mode) for rate in options.rates for mode in MODES], "serving")
    }
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(show(runs))
    verdicts = [verdict for rate in options.rates for verdict in judge(rate, {mode: runs[rate, mode].lost_s for mode in MODES})]
    for words, is_met in verdicts:
        console.print(f"{words}: {'met' if is_met else 'MISSED'}")
    return 0 if all(is_met for _, is_met in verdicts) else 1


def requests(count: int, seed: int) -> list[Admit]:
    """An overload: prompts of 128 to 512 tokens without common beginnings, outputs of 1,024 to 2,048, in a burst."""
    draw = random.Random(seed)
    arrivals, now = [], 0.0
    for number in range(1, count + 1):
        now += draw.expovariate(20.0)
        prompt = [draw.randrange(1000) for _ in range(draw.randint(128, 512))]
        params = SamplingParams(temperature=0.0, max_tokens=draw.randint(1024, 2048), ignore_eos=True)
        arrivals.append(Admit(RequestId(number), str(number), prompt, params, now))
    return arrivals


def serve(mode: PreemptionMode, rate: float, num_requests: int, seed: int) -> Outcome:
    """One run in virtual time with copies at `rate` GB/s each way."""
    num_host_blocks = 0 if mode == "recompute" else NUM_HOST_BLOCKS
    config = EngineConfig(
        model="simulated",
        block_size=BLOCK_SIZE,
        num_device_blocks=NUM_BLOCKS,
        num_host_blocks=num_host_blocks,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        preemption_mode=mode,
        enable_prefix_caching=True,
        credit_window=1_000_000,
    )
    device = SimulatedExecutor(
        num_device_blocks=NUM_BLOCKS,
        num_host_blocks=num_host_blocks,
        block_size=BLOCK_SIZE,
        block_bytes=BLOCK_SIZE * TOKEN_BYTES,
        max_model_len=8192,
    )
    latency = LatencyModel(
        step_s=STEP_S,
        token_s=TOKEN_S,
        attended_s=ATTENDED_S,
        row_s=ROW_S,
        copy_s=20e-6,
        out_rate=rate * 1e9,
        in_rate=rate * 1e9,
    )
    run = VirtualRun(config, device, latency)
    admits = requests(num_requests, seed)
    run.go(admits)
    stats = run.core.stats()
    needed = sum(len(admit.token_ids) + len(run.tokens[admit.request_id]) - 1 for admit in admits)
    recomputed_s = (stats.num_computed_tokens - needed) * TOKEN_S
    waited_s = run.device.waited_s["step"]
    first = [run.tokens[admit.request_id][0][0] - admit.arrival_s for admit in admits]
    gaps = [
        later - sooner
        for times in ([at for at, _ in tokens] for tokens in run.tokens.values())
        for sooner, later in pairwise(times)
    ]
    return Outcome(
        lost_s=recomputed_s + waited_s + run.still_s,
        recomputed_s=recomputed_s,
        waited_s=waited_s,
        still_s=run.still_s,
        tokens_per_s=sum(map(len, run.tokens.values())) / run.now,
        ttft_s=percentiles(first),
        itl_s=percentiles(gaps),
        num_bytes=stats.swap_out_bytes + stats.swap_in_bytes,
        num_preemptions=stats.num_preemptions,
    )


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """P50 and P99."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]


def judge(rate: float, lost_s: dict[PreemptionMode, float]) -> list[tuple[str, bool]]:
    """What `auto` lost against the two fixed modes."""
    best, worst = sorted((lost_s["recompute"] + 1e-9, lost_s["swap"] + 1e-9))
    name = f"{rate:g} GB/s"
    found = [
        (f"{name}: auto / better {lost_s['auto'] / best:.2f} (at most {MOST_OF_BEST})", lost_s["auto"] <= MOST_OF_BEST * best)
    ]
    if rate in JUDGED_BY_WORST:
        is_met = lost_s["auto"] <= MOST_OF_WORST * worst
        found.append((f"{name}: auto / worse {lost_s['auto'] / worst:.2f} (at most {MOST_OF_WORST})", is_met))
    return found


def show(runs: dict[tuple[float, PreemptionMode], Outcome]) -> Table:
    """The runs as a table."""
    table = Table(title="lost to preemption, seconds of the device (virtual time)")
    columns = ("GB/s", "mode", "lost", "= again", "+ wait", "+ still", "tok/s", "TTFT s P50/P99", "ITL ms P50/P99")
    for column in (*columns, "GB moved", "rec./swap"):
        table.add_column(column, justify="right", no_wrap=True)
    for (rate, mode), run in runs.items():
        table.add_row(
            f"{rate:g}",
            mode,
            f"{run.lost_s:.4f}",
            f"{run.recomputed_s:.4f}",
            f"{run.waited_s:.4f}",
            f"{run.still_s:.4f}",
            f"{run.tokens_per_s:.0f}",
            "/".join(f"{value:.2f}" for value in run.ttft_s),
            "/".join(f"{value * 1e3:.1f}" for value in run.itl_s),
            f"{run.num_bytes / 1e9:.1f}",
            f"{run.num_preemptions['recompute']}/{run.num_preemptions['swap']}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
