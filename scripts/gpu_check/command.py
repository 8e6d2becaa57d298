"""The command line of `scripts/gpu-check`. Standard library only: it must work where nothing else does."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from pathlib import Path

from repertory.gpu.cuda.available import why_no_cuda

from . import wheels
from .catalogue import BUDGET_S, PARTS, Part, UnknownPartError, chosen
from .results import Results, table
from .running import Plan, run_all, stderr_line

ABOUT = """\
Proves the GPU part on a machine with one GPU, in under 5 minutes and without a network: attention, kernels and sampling
against references, the whole engine's tokens against plain torch, swapping, captured steps, throughput against what the
device can do, and the scheduling table. Prints a table last, and writes everything to OUT/gpu-check.json after each part.

Exit status 0: every part that ran was right. An aim that was missed is said and does not fail."""

MORE = """\
The machine needs Python 3.11 or newer with torch, triton and numpy. The few packages that the engine needs beside them
travel as wheels: run `scripts/gpu-check --prepare` where there is a network, and take .gpu-check/ along with the checkout.

  scripts/gpu-check --prepare                  here: fetch the wheels
  scripts/gpu-check                            on the GPU machine: everything
  scripts/gpu-check --parts throughput,swap    some parts
  scripts/gpu-check --rehearse                 every part on the CPU, with tiny sizes: does the script itself work?
  TRITON_INTERPRET=1 scripts/gpu-check --rehearse    the same with our kernels, in Triton's interpreter (slow)

The parts, in the order in which they run:
"""


def main(arguments: list[str], root: Path) -> int:
    """Run the command. `root` is the checkout."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.prepare:
        return wheels.prepare(root)
    try:
        parts = chosen(options.parts)
    except UnknownPartError as error:
        parser.error(str(error))
    if options.budget_s <= 0:
        parser.error(f"--budget-s must be above 0, got {options.budget_s:g}")
    if not options.rehearse and (reason := why_no_cuda()) is not None:
        print(f"gpu-check: no GPU to check: {reason} (--rehearse runs on the CPU)", file=sys.stderr)
        return 2
    if missing := wheels.missing():
        print(f"gpu-check: Python lacks {', '.join(missing)}: --help says how to bring them", file=sys.stderr)
        return 2
    return _check(parts, options, root)


def _check(parts: list[Part], options: argparse.Namespace, root: Path) -> int:
    out = Path(options.out or os.environ.get("OUT") or root / "gpu-check-out")
    out.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    results = Results(options.rehearse, now, options.budget_s)
    if options.rehearse:
        parts = [part._replace(limit_s=options.budget_s) for part in parts]  # they are a GPU's
    plan = Plan(
        command=lambda part, records: [
            sys.executable, "-m", f"{__package__}.part", part.name, str(records), *(["rehearse"] if options.rehearse else []),
        ],
        jobs=max(1, (os.cpu_count() or 1) // 2),
        say=stderr_line(time.monotonic()),
    )  # fmt: skip
    try:
        run_all(parts, plan, results, out / "gpu-check.json")
    finally:
        shown = table(results)
        (out / "gpu-check.txt").write_text(shown + "\n")
        print(shown, flush=True)
    return 0 if results.is_right else 1


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {part.name:<12} {part.about}" for part in PARTS)
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check", description=ABOUT, epilog=MORE + listed, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", metavar="A,B", help="only these (default: all)")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes; timings mean nothing")
    parser.add_argument("--prepare", action="store_true", help="fetch the wheels that a GPU machine needs, into .gpu-check/")
    parser.add_argument("--out", metavar="FOLDER", help="where the results go (default: $OUT, else gpu-check-out/)")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, metavar="SECONDS", help=f"time for all of it (default: {BUDGET_S:.0f})"
    )
    return parser
