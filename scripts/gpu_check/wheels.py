"""The packages that the engine needs beside torch, as wheels that travel with the checkout. Standard library only.

    `prepare`   with a network: fetches them for CPython 3.12 on Linux, x86-64, at the versions of constraints.txt
    `unpack`    without one: a wheel is a zip file that is importable once unpacked; one for another Python is left alone

What a machine with torch has anyway is not among them (`MACHINES_OWN`): numpy, and torch itself with Triton.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

FOLDER = ".gpu-check"

PACKAGES = {
    "anyio": "anyio",
    "msgspec": "msgspec",
    "opentelemetry-api": "opentelemetry",
    "pyzmq": "zmq",
    "rich": "rich",
    "safetensors": "safetensors",
    "structlog": "structlog",
    "tokenizers": "tokenizers",
    "typing_extensions": "typing_extensions",
}
"""Distribution -> module: what an engine with an inline device imports at once. The smallest set with which it runs."""

MACHINES_OWN = ("torch", "numpy")

MOST_BYTES = 60 << 20
"""Of the checkout and the wheels together."""

_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)] + [
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
]
_PYTHON = "3.12"


def missing() -> list[str]:
    """Distributions that cannot be imported here."""
    wanted = {**{name: name for name in MACHINES_OWN}, **PACKAGES}
    return [name for name, module in wanted.items() if find_spec(module) is None]


def unpack(folder: Path, site: Path) -> None:
    """Make the wheels in `folder` that this Python can use importable from `site`."""
    for wheel in sorted(folder.glob("*.whl")):
        if fits(wheel.name):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(site)


def fits(wheel: str) -> bool:
    """Whether a wheel called so is for this Python on this kind of machine (PEP 427)."""
    python, abi, platform = wheel.removesuffix(".whl").split("-")[-3:]
    version = sys.version_info[:2]
    own = f"cp{version[0]}{version[1]}"
    if platform != "any" and not platform.endswith(
        sysconfig.get_platform().replace("-", "_").replace(".", "_").partition("_")[2]
    ):
        return False
    if abi == "abi3":
        return any(tag.startswith("cp3") and int(tag[3:]) <= version[1] for tag in python.split("."))
    return abi in ("none", own) and any(tag in ("py3", "py2.py3", own) for tag in [python, *python.split(".")])


def prepare(root: Path) -> int:
    """Fetch the wheels and say what they and the checkout come to; 1 if pip fails or it is too much."""
    versions = _versions(root / "constraints.txt")
    with tempfile.TemporaryDirectory() as fresh:
        status = subprocess.run(
            [
                sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", fresh,
                "--python-version", _PYTHON, "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none",
                *(word for platform in _PLATFORMS for word in ("--platform", platform)),
                *(f"{name}=={versions[_normal(name)]}" for name in PACKAGES),
            ],
            check=False,
        ).returncode  # fmt: skip
        if status:
            print(f"gpu-check: pip could not fetch the wheels (exit status {status})", file=sys.stderr)
            return 1
        folder = root / FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        wheels = [Path(shutil.move(wheel, folder)) for wheel in sorted(Path(fresh).glob("*.whl"))]
    for wheel in wheels:
        print(f"{_mib(wheel.stat().st_size)}  {wheel.name}")
    tree, fetched = tree_bytes(root), sum(wheel.stat().st_size for wheel in wheels)
    parts = f"{len(wheels)} wheels of {_mib(fetched).strip()} and the checkout's {_mib(tree).strip()}"
    print(f"{_mib(tree + fetched).strip()}: {parts}, of at most {_mib(MOST_BYTES).strip()}")
    if tree + fetched > MOST_BYTES:
        print("gpu-check: that is too much to travel", file=sys.stderr)
        return 1
    return 0


def tree_bytes(root: Path) -> int:
    """Bytes of the files that git does not ignore."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
    ).stdout
    names = set(listed.split(b"\0")) - {b""}
    return _bytes(root / os.fsdecode(name) for name in names)


def _bytes(paths: Iterable[Path]) -> int:
    return sum(path.lstat().st_size for path in paths if path.is_symlink() or path.is_file())


def _versions(constraints: Path) -> dict[str, str]:
    lines = constraints.read_text().splitlines()
    return {_normal(name): version for name, _, version in (line.strip().partition("==") for line in lines) if version}


def _normal(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:6.2f} MiB"
