"""This engine and others on the same core, with the same weights and requests: `scripts/bench peers`.

Each engine is a process of its own (`peers/drive_*.py`), pinned to one core and kept running; the
workloads A to E (`actors/commands/benching/workloads.py`) go round them in turn, so that what disturbs the
machine disturbs all alike. Only the ratios of one run mean anything. First the workloads A to D with each
engine's own defaults, then E with a budget of 256 tokens a step for those that have such a thing.
Prefix caches are on, as they are by default; only C has prompts that share anything.

The first run installs the peers: minutes and gigabytes, kept in a folder. A peer that cannot be installed, or
fails, is named and left out. `--smoke` runs everything with a few tokens each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from repertory.gpu.models.source import default_cache_dir, demo_file, resolve_model
from repertory.scripts.benches.peers import weights
from repertory.scripts.benches.peers.installing import DRIVERS, INSTALLERS, InstallError, Launch
from repertory.scripts.benches.peers.reckoning import MEMORY, OURS, comparison_rows, floor_rows, floors, table
from repertory.scripts.benches.peers.running import Driver, Rounds

PEER_WORKLOADS = {"vllm": "ABCDE", "transformers": "ABCD", "llamacpp": "B"}
"""transformers has no usable continuous batching on CPU; of llama.cpp only the speed of a step is compared."""
BUDGET_E = 256


class Plan(NamedTuple):
    """A round: how its engines are started, and which of them run which workload."""

    starts: dict[str, Callable[[], Driver]]
    workloads: dict[str, list[str]]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers", type=names(INSTALLERS), default=list(INSTALLERS), help="default: all of them")
    parser.add_argument("--workloads", type=names("ABCDE"), default=list("ABCDE"), help="default: A,B,C,D,E")
    parser.add_argument("--repetitions", type=int, default=3, help="measured ones; one more warms up (default: 3)")
    core = max(os.sched_getaffinity(0))
    parser.add_argument("--core", type=int, default=core, help=f"that all engines are pinned to (default: {core})")
    parser.add_argument("--folder", type=Path, default=default_cache_dir() / "peers", help="for environments and weights")
    parser.add_argument("--json", type=Path, help="where everything that was measured goes")
    parser.add_argument("--skip-install", action="store_true", help="only the peers that are installed already")
    parser.add_argument("--smoke", action="store_true", help="a few tokens each: whether it works, not how fast")
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error("--repetitions: at least 1")
    if options.core not in os.sched_getaffinity(0):
        parser.error(f"--core: {options.core} is not one of {sorted(os.sched_getaffinity(0))}")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.absolute().parent}")
    return options


def names(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """A type of argument: names of those `allowed`, with commas between them."""

    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        if unknown := [name for name in chosen if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(allowed)}")
        return chosen

    return parse


def main() -> int:
    """Install, run, print. Fails if our own engine did."""
    options = arguments()
    folder = options.folder.expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    source = resolve_model("demo", progress=say)
    model = weights.bf16_directory(source, folder / f"{source.name}-bf16")
    commands = engine_commands(folder, model, options)
    rounds = Rounds(repetitions=options.repetitions, small=options.smoke, say=say)
    for letters, budget in (("ABCD", None), ("E", BUDGET_E)):
        chosen = [letter for letter in letters if letter in options.workloads]
        if chosen:
            rounds.run(*planned(commands, chosen, budget, core=options.core, folder=folder))
    report(rounds, weights.weight_bytes(model), aims=not options.smoke)
    if options.json:
        options.json.write_text(json.dumps(record(rounds, options), indent=1))
    return 1 if OURS in rounds.lost else 0


def engine_commands(folder: Path, model: Path, options: argparse.Namespace) -> dict[str, Launch]:
    """How each engine is started on the model; peers that cannot be are named and left out. Ours comes first."""
    python = sys.executable
    found = {
        OURS: Launch([python, str(DRIVERS / "drive_repertory.py"), str(model)], {}),
        MEMORY: Launch([python, str(DRIVERS / "drive_memory.py")], {}),
    }
    for peer in options.peers:
        try:
            launch = INSTALLERS[peer](folder, core=options.core, install=not options.skip_install)
            weight_file = model
            if peer == "llamacpp":
                programs = folder / "llamacpp/build/bin"
                weight_file = weights.bf16_gguf(demo_file(), folder / f"{model.name}.gguf", programs=programs)
        except (InstallError, OSError, subprocess.SubprocessError) as error:
            say(f"{peer}: left out: {error}")
            continue
        found[peer] = Launch([*launch.command, str(weight_file)], launch.environ)
    return found


def planned(commands: dict[str, Launch], letters: list[str], budget: int | None, *, core: int, folder: Path) -> Plan:
    """The round of these workloads, with a budget of tokens a step, or each engine's default."""
    workloads = {
        letter: [engine for engine in commands if engine == OURS or letter in PEER_WORKLOADS.get(engine, "")]
        for letter in letters
    }
    if "B" in letters:
        workloads["memory"] = [MEMORY]
    if "D" in letters:
        workloads["P"] = [OURS]
    budgets = [] if budget is None else ["--budget", str(budget)]
    starts = {
        engine: partial(Driver, engine, launch, budgets, core=core, log=folder / f"{engine}.log")
        for engine, launch in commands.items()
        if any(engine in engines for engines in workloads.values())
    }
    return Plan(starts, workloads)


def report(rounds: Rounds, weight_bytes: int, *, aims: bool) -> None:
    """Print everything: who took part, the comparison, the floors, who was lost. `aims`: and what was aimed at."""
    print(f"\n{processor()}, one core; bf16; median [least..most] of repetitions; ratio: ours / theirs")
    print(", ".join(rounds.names.values()), "\n")
    shown = slice(None) if aims else slice(-1)  # the aim is the last column
    comparison = [["", "metric", "engine", "measured", "ours / it", "aim"], *comparison_rows(rounds.results)]
    print(table([row[shown] for row in comparison]), "\n")
    if held := floor_rows(floors(rounds.results, weight_bytes)):
        print(table([row[shown] for row in (["floor", "measured", "aim"], *held)]))
    for engine, reason in rounds.lost.items():
        print(f"\nlost on the way: {engine}: {reason}")


def record(rounds: Rounds, options: argparse.Namespace) -> dict[str, Any]:
    """What `--json` keeps: every reply as it came."""
    settings = {name: str(value) for name, value in vars(options).items()}
    facts = {"processor": processor(), "settings": settings, "engines": rounds.names, "lost": rounds.lost}
    return facts | {"replies": rounds.results}


def processor() -> str:
    """What the machine calls its CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def say(text: str) -> None:
    """A line of progress, out of the way of the tables."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
