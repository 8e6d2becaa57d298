"""A program: compile every variant for one architecture. One JSON line each on stdout, its name on stderr before it.

Kernels are either interpreted or compiled for the life of a process, and the tests interpret them: hence a process.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from repertory.gpu.cuda.kernels.catalogue import compile_variant, every_variant
from repertory.gpu.cuda.kernels.launch import INTERPRETED, Variant

FIRST_WITH_FLOAT8 = 89

MARK = "compiling: "


def can_compile(variant: Variant, arch: int) -> bool:
    """Whether that architecture has the variant's dtypes."""
    return arch >= FIRST_WITH_FLOAT8 or "fp8" not in variant.name


def first_of_each_kernel() -> set[str]:
    """The names of one variant of each kernel, and one more of those that have any with float8."""
    found: dict[tuple[str, bool], str] = {}
    for variant in every_variant():
        found.setdefault((variant.kernel.__name__, "fp8" in variant.name), variant.name)
    return set(found.values())


def main(arch: int, which: str) -> None:
    """Compile what `arch` can, of all variants or of the `first_of_each_kernel`; one that fails does not end it."""
    assert not INTERPRETED
    wanted = {variant.name for variant in every_variant()} if which == "all" else first_of_each_kernel()
    for variant in every_variant():
        if variant.name in wanted and can_compile(variant, arch):
            sys.stderr.write(f"\n{MARK}{variant.name}\n")
            sys.stderr.flush()
            sys.stdout.write(json.dumps(_compiled(variant, arch)) + "\n")
            sys.stdout.flush()


def _compiled(variant: Variant, arch: int) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        outcome: dict[str, Any] = {"num_bytes": compile_variant(variant, arch)}
    except Exception as error:  # whatever Triton raises is what the test shows
        outcome = {"error": f"{type(error).__name__}: {error}"}
    return {"name": variant.name, "seconds": round(time.perf_counter() - started, 3), **outcome}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
