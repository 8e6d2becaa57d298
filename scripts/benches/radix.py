"""Microseconds of the prefix cache's operations, p50: `scripts/bench radix`.

The tree holds sequences of 4,096 random tokens in groups; the sequences of a group share their first
2,048 tokens. Block ids are dealt in random order, as they are after a while of service. Each figure
is the median of single calls. Peers' figures are of the same workload with blocks or pages of 16,
measured elsewhere (their own code, another run): they say how far off an aim is, not who wins.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from repertory.protocol.ids import SequenceId, StepId
from repertory.radix.cache import KVCache
from repertory.radix.lookup import Match
from repertory.radix.tokens import TokenLog

NUM_TOKENS = 4096
NUM_SHARED = 2048
BLOCK_SIZE = 16
VOCAB_SIZE = 50_000
BLOCKS_EACH = NUM_TOKENS // BLOCK_SIZE
NAMESPACE = "bench"
WIDTH = 124
"""Columns of the table, terminal or not."""
PROBES = 400
"""Room for this many sequences beside those that fill the cache."""

ROWS: dict[str, tuple[float | None, str, str, str, str]] = {
    "match 4,096 tokens": (15, "28 (Rust 10.7)", "18", "158 + hashing 470", "465"),
    "match, half of it cached": (None, "15 (Rust 7.0)", "13", "-", "-"),
    "match, nothing cached": (None, "7.6", "4.6", "3.4", "3.7"),
    "insert 4,096 tokens into the tree": (40, "49 (Rust 36)", "36", "241 + hashing 470", "587"),
    "a sequence: open, admit, grow, enter": (None, "-", "-", "-", "-"),
    "the same, half of it cached": (None, "-", "-", "-", "-"),
    "lock": (1, "1.9 (Rust 1.8)", "0.6", "-", "-"),
    "unlock": (None, "1.8", "0.5", "22", "19"),
    "evict 16 tokens": (5, "95, drops 2,048", "179, drops 2,048", "0.5, drops 16", "-"),
}
"""Operation: our aim, then SGLang 0.5.23, mini-sglang, vLLM 0.32, nano-vllm, in microseconds."""


def main() -> None:
    """Fill a cache, time each operation on it, print the table."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench radix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=1000, help="sequences in the cache (default: 1000)")
    parser.add_argument("--groups", type=int, default=20, help="groups that share their first half (default: 20)")
    arguments = parser.parse_args()
    if not 1 <= arguments.groups <= arguments.sequences:
        parser.error(f"--groups must be 1 to --sequences, got {arguments.groups} of {arguments.sequences}")
    bench = Bench(arguments.sequences, arguments.groups)
    times = {**bench.entering(), **bench.matching(), **bench.locking(), **bench.inserting(), **bench.evicting()}
    table = Table(title=f"{arguments.sequences} sequences of {NUM_TOKENS} tokens, {arguments.groups} groups, us")
    table.add_column("operation")
    for heading in ("ours", "aim", "SGLang *", "mini-sglang *", "vLLM *", "nano-vllm *"):
        table.add_column(heading, justify="right")
    for name, (aim, *peers) in ROWS.items():
        ours = times[name]
        shown = f"{ours:.1f}" if aim is None or ours <= aim else f"[red]{ours:.1f}[/red]"
        table.add_row(name, shown, "" if aim is None else f"{aim:g}", *peers)
    console = Console(width=WIDTH)
    console.print(table)
    console.print("* measured elsewhere: the same workload on the same kind of machine, blocks or pages of 16, another run")


class Bench:
    """A full cache and the logs it was filled with."""

    def __init__(self, num_sequences: int, num_groups: int) -> None:
        self.rng = random.Random(0)
        self.shared = [self._tokens(NUM_SHARED) for _ in range(num_groups)]
        own = NUM_TOKENS - NUM_SHARED
        self.logs = [TokenLog(self.shared[i % num_groups] + self._tokens(own)) for i in range(num_sequences)]
        self.cache = KVCache((num_sequences + num_groups + PROBES) * BLOCKS_EACH, BLOCK_SIZE)
        self.num_opened = 0
        self._shuffle_blocks()

    def entering(self) -> dict[str, float]:
        """Enter every sequence as the scheduler does, one a step; the first of a group is all new."""
        new: list[float] = []
        half: list[float] = []
        for log in self.logs:
            microseconds, cached = self._enter(log)
            (half if cached else new).append(microseconds)
        new += [self._enter(TokenLog(self._tokens(NUM_TOKENS)))[0] for _ in range(PROBES // 2)]
        return {"a sequence: open, admit, grow, enter": p50(new), "the same, half of it cached": p50(half or new)}

    def matching(self) -> dict[str, float]:
        """Look up logs that are cached whole, by half, not at all."""
        half = [TokenLog(self.rng.choice(self.shared) + self._tokens(NUM_SHARED)) for _ in range(200)]
        misses = [TokenLog(self._tokens(NUM_TOKENS)) for _ in range(200)]
        assert all(self._match(log).depth == BLOCKS_EACH for log in self.logs)
        assert all(self._match(log).depth == NUM_SHARED // BLOCK_SIZE for log in half)
        return {
            "match 4,096 tokens": timed(self._match, self.logs),
            "match, half of it cached": timed(self._match, half),
            "match, nothing cached": timed(self._match, misses),
        }

    def locking(self) -> dict[str, float]:
        """Lock and unlock the whole path of each sequence."""
        tree = self.cache.tree
        matches = [self._match(log) for log in self.logs]
        lock = timed(tree.lock, matches)
        return {"lock": lock, "unlock": timed(lambda match: tree.unlock(match.node), matches)}

    def inserting(self) -> dict[str, float]:
        """Hang runs of 4,096 new tokens below the root: the tree alone, the copy of the tokens included."""
        tree = self.cache.tree
        logs = [TokenLog(self._tokens(NUM_TOKENS)) for _ in range(PROBES // 4)]
        anchor = tree.lock(tree.match(tree.root(NAMESPACE), logs[0], 0))
        blocks = iter([self.cache.pool.take(BLOCKS_EACH) for _ in logs])
        nodes = []

        def insert(log: TokenLog) -> None:
            nodes.append(tree.insert(anchor, log.buffer[:], next(blocks), 1))

        microseconds = timed(insert, logs)
        anchor.locks += len(nodes) - 1  # as if each had been entered by a sequence that locks the root too
        for node in nodes:
            tree.unlock(node)
        return {"insert 4,096 tokens into the tree": microseconds}

    def evicting(self) -> dict[str, float]:
        """Evict one block at a time; each must drop exactly its 16 tokens."""
        cache, tree = self.cache, self.cache.tree

        times = []
        for _ in range(2000):
            before = cache.counts()
            times.append(timed(tree.evict, [1]))
            after = cache.counts()
            assert (before.cached - after.cached, after.free - before.free) == (1, 1), "not exactly 16 tokens"
        problems = cache.check_integrity()
        assert not problems, problems
        return {"evict 16 tokens": p50(times)}

    def _enter(self, log: TokenLog) -> tuple[float, int]:
        cache = self.cache
        self.num_opened += 1
        cache.begin_step(StepId(self.num_opened))
        start = time.perf_counter_ns()
        holding = cache.open(SequenceId(self.num_opened), NAMESPACE)
        found = cache.admit(holding, log)
        assert found is not None
        cache.grow(holding, NUM_TOKENS)
        cache.enter(holding, log, found, NUM_TOKENS)
        microseconds = (time.perf_counter_ns() - start) / 1e3
        cache.close(holding)
        return microseconds, found

    def _match(self, log: TokenLog) -> Match:
        return self.cache.tree.match(self.cache.tree.root(NAMESPACE), log, NUM_TOKENS)

    def _tokens(self, count: int) -> list[int]:
        return self.rng.choices(range(VOCAB_SIZE), k=count)

    def _shuffle_blocks(self) -> None:
        blocks = self.cache.pool.take(self.cache.num_blocks)
        self.rng.shuffle(blocks)
        self.cache.pool.free_private(blocks)


def timed(operation: Callable[[Any], object], arguments: Iterable[Any]) -> float:
    """p50 of one call, in microseconds."""
    times = []
    for argument in arguments:
        start = time.perf_counter_ns()
        operation(argument)
        times.append(time.perf_counter_ns() - start)
    return p50(times) / 1e3


def p50(times: Iterable[float]) -> float:
    """The median."""
    return statistics.median(times)


if __name__ == "__main__":
    main()
