"""Milliseconds to sample a step's rows on one core, in C and in torch: `scripts/bench sampling`.

Logits are random (normal, standard deviation 3, the spread of a model's), float32, the same for both. Each figure is the
median processor time of single calls, Python around them included; the two take turns. A greedy step of an engine is
cheaper than the first row: where nobody needs the logits they are compared as they are computed.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from repertory.gpu.cpu import library as lib
from repertory.gpu.cpu.sampler import Sampler
from repertory.gpu.sampling import Sampled, SamplingRow, sample
from repertory.gpu.sampling_edits import LogitEdits, packed_mask
from repertory.protocol.ids import SequenceId
from repertory.protocol.messages import Barred, NewRow
from repertory.protocol.sampling import SamplingParams

WIDTH = 100
"""Columns of the table, terminal or not."""
NUM_PROMPT = 500
NUM_OUTPUT = 100

PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
FILTERS = {"top_k": 50, "top_p": 0.9, "min_p": 0.01}
EVERYTHING = "everything on"
KINDS: dict[str, tuple[float | None, Mapping[str, Any]]] = {
    "greedy": (1, {"temperature": 0.0}),
    "temperature": (6, {}),
    "min-p 0.01": (None, {"min_p": 0.01}),
    "top-k 50": (None, {"top_k": 50}),
    "top-p 0.9": (None, {"top_p": 0.9}),
    "top-k 5,000, top-p 0.9": (None, {"top_k": 5000, "top_p": 0.9}),
    "penalties": (None, PENALTIES),
    "a mask of half the vocabulary": (None, {}),
    EVERYTHING: (12, {**PENALTIES, **FILTERS, "logit_bias": dict.fromkeys(range(0, 1000, 10), 1.0), "min_tokens": 200}),
}
"""Kind: our aim for 64 rows of 49,152 logits in milliseconds, and its parameters beside temperature 1."""


def main() -> None:
    """Time each kind of row on both paths, print the table."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench sampling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64, help="rows of a step (default: 64)")
    parser.add_argument("--vocab", type=int, default=49_152, help="size of the vocabulary (default: 49152)")
    parser.add_argument("--repeats", type=int, default=15, help="calls of each kind (default: 15)")
    arguments = parser.parse_args()
    if min(arguments.rows, arguments.repeats) < 1 or arguments.vocab < 1000:
        parser.error("--rows and --repeats must be at least 1, --vocab at least 1000")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    print_table(arguments.rows, arguments.vocab, arguments.repeats)


def print_table(num_rows: int, vocab_size: int, repeats: int) -> None:
    """Measure and print."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    library = lib.open_library()
    level = lib.level_for(library, torch.float32)
    team = library.team_open(1)
    in_c = Sampler(library, level, team, num_threads=1, vocab_size=vocab_size).sample
    table = Table(title=f"{num_rows} rows of {vocab_size:,} logits, one core, ms", width=WIDTH)
    for name in ("rows", "aim", f"C ({lib.LEVELS[level]})", "torch", "torch / C", "same tokens"):
        table.add_column(name, justify="left" if name == "rows" else "right")
    for name, (aim, fields) in KINDS.items():
        rows = [row_of(name, fields, number, vocab_size) for number in range(num_rows)]
        (ours, found), (torchs, expected) = timed([in_c, sample], logits, rows, repeats)
        same = sum(a == b for a, b in zip(found, expected, strict=True))
        as_text = "-" if aim is None else f"{aim:g}"
        table.add_row(name, as_text, f"{ours:.2f}", f"{torchs:.1f}", f"{torchs / ours:.1f}", f"{same} of {num_rows}")
    library.team_close(team)
    Console(width=WIDTH).print(table)


def row_of(name: str, fields: Mapping[str, Any], number: int, vocab_size: int) -> SamplingRow:
    """A row in the middle of an answer."""
    draw = random.Random(number)
    log = draw.choices(range(vocab_size), k=NUM_PROMPT + NUM_OUTPUT)
    params = SamplingParams(**{"temperature": 1.0, "seed": number, **fields})  # of many types
    words = [draw.choices(range(vocab_size), k=draw.randint(1, 3)) for _ in range(20)]
    barred = Barred([2], words) if name == EVERYTHING else None
    edits = LogitEdits.of(NewRow(SequenceId(number), log, NUM_PROMPT, params, [], barred=barred))
    if edits is not None:
        edits.catch_up(log)
    mask = packed_mask(draw.sample(range(vocab_size), vocab_size // 2)) if name.startswith("a mask") else None
    return SamplingRow(params, 0, NUM_OUTPUT, edits, mask)


def timed(
    paths: list[Callable[[Tensor, list[SamplingRow]], Sampled]], logits: Tensor, rows: list[SamplingRow], repeats: int
) -> list[tuple[float, list[int]]]:
    """Median milliseconds of each path, in turns, and the tokens it gave."""
    seconds: list[list[float]] = [[] for _ in paths]
    tokens: list[list[int]] = [path(logits, rows).token_ids for path in paths]
    for _ in range(repeats):
        for path, times in zip(paths, seconds, strict=True):
            started = time.thread_time()
            path(logits, rows)
            times.append(time.thread_time() - started)
    return [(1000 * statistics.median(times), found) for times, found in zip(seconds, tokens, strict=True)]


if __name__ == "__main__":
    main()
