"""Every kernel compiles for the GPUs it is meant for. Interpreted kernels hide what only the compiler refuses.

One form of each kernel, and one more with float8; all forms when slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from repertory.gpu.cuda.kernels import catalogue, launch
from repertory.tests.gpu_cuda.compile_all import MARK, can_compile, first_of_each_kernel

ARCHITECTURES = (90, 80)

TIMEOUT_S = 600
"""The whole takes seconds on a machine that does nothing else; a compiler that hangs must not hang the tests."""

pytestmark = [pytest.mark.timeout(TIMEOUT_S + 60), pytest.mark.xdist_group("compiler")]

FIRST = first_of_each_kernel()

EVERY_CASE = [
    pytest.param(arch, variant.name, id=f"sm_{arch} {variant.name}", marks=[] if variant.name in FIRST else pytest.mark.slow)
    for arch in ARCHITECTURES
    for variant in catalogue.every_variant()
    if can_compile(variant, arch)
]


class Compilation(NamedTuple):
    """What a run of `compile_all.py` said: an answer each variant, and what the compiler wrote meanwhile."""

    answers: Mapping[str, Mapping[str, Any]]
    remarks: Mapping[str, str]
    ending: str


@pytest.fixture(scope="module")
def compilations(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Compilation]:
    """Variants compiled from nothing, side by side for all architectures: all of them where a slow one is selected."""
    which = "all" if any(item.get_closest_marker("slow") for item in request.session.items) else "first"
    deadline = time.monotonic() + TIMEOUT_S
    folder = tmp_path_factory.mktemp("compiled")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    program = Path(__file__).with_name("compile_all.py")
    with ExitStack() as stack:
        runs = {}
        for arch in ARCHITECTURES:
            outputs = [stack.enter_context((folder / f"{arch}.{name}").open("w+")) for name in ("out", "err")]
            arguments = [sys.executable, str(program), str(arch), which]
            run = stack.enter_context(subprocess.Popen(arguments, stdout=outputs[0], stderr=outputs[1], env=environment))
            stack.callback(run.kill)
            runs[arch] = run, outputs
        return {arch: _compilation(run, *outputs, deadline=deadline) for arch, (run, outputs) in runs.items()}


def _compilation(run: subprocess.Popen[bytes], output: Any, errors: Any, *, deadline: float) -> Compilation:
    try:
        ending = f"the compiling process ended with {run.wait(deadline - time.monotonic())}"
    except subprocess.TimeoutExpired:
        ending = f"the compiling process was not done after {TIMEOUT_S} s"
    for file in (output, errors):
        file.seek(0)
    before, *sections = errors.read().split(MARK)
    remarks = {name: text for name, _, text in (section.partition("\n") for section in sections)}
    lines = (line for line in output.read().splitlines() if line.startswith("{"))
    answers = {answer["name"]: answer for answer in map(json.loads, lines)}
    return Compilation(answers, remarks, f"{ending}\n{before}{sections[-1] if sections else ''}")


@pytest.mark.parametrize(("arch", "name"), EVERY_CASE)
def test_a_variant_compiles_to_machine_code(compilations: Mapping[int, Compilation], arch: int, name: str) -> None:
    compilation = compilations[arch]
    answer = compilation.answers.get(name)
    assert answer is not None, f"no answer: {compilation.ending}"
    assert answer.get("num_bytes", 0) > 0, f"{answer.get('error')}\n{compilation.remarks.get(name, '')}"


def test_every_module_with_kernels_is_found() -> None:
    found = {module.__name__.rpartition(".")[2] for module in catalogue.kernel_modules()}
    assert {"norms", "rope", "activation", "blocks"} <= found
    files = {path.stem for path in Path(catalogue.__file__).parent.glob("*.py")}
    assert found == files - {"__init__", "launch", "catalogue", "paged", "paged_forms"}


@pytest.mark.parametrize("variants", [None, []])
def test_a_kernel_module_without_variants_is_refused(
    monkeypatch: pytest.MonkeyPatch, variants: list[launch.Variant] | None
) -> None:
    module = ModuleType("forgotten")
    if variants is not None:
        module.VARIANTS = variants  # type: ignore[attr-defined] # as a real module has it
    monkeypatch.setattr(catalogue, "kernel_modules", lambda: [module])
    with pytest.raises(ValueError, match="forgotten has no VARIANTS"):
        catalogue.every_variant()


def test_two_variants_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("twice")
    module.VARIANTS = [launch.Variant("same", None, {}, {})] * 2  # type: ignore[attr-defined] # as a real module has it
    monkeypatch.setattr(catalogue, "kernel_modules", lambda: [module])
    with pytest.raises(ValueError, match="two variants are called 'same'"):
        catalogue.every_variant()
