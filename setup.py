"""Builds the CPU kernels, if there is a compiler. Everything else about the package is in pyproject.toml.

The library is plain C and loaded with ctypes: it has no Python in it, and no installation fails for want of it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

KERNELS = Path("gpu/cpu/kernels")
SOURCES = sorted(KERNELS.glob("*.c"))
HEADERS = sorted(KERNELS.glob("*.h"))


def source_hash() -> str:
    """Digest of all sources, as gpu/cpu/library.py computes it: an old library is noticed and not used."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCES, *HEADERS], key=lambda path: path.name):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class BuildModules(build_py):
    """All modules but this one, which lies where the package `repertory` has its own."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """See the base class."""
        return [found for found in super().find_package_modules(package, package_dir) if found[:2] != ("repertory", "setup")]


setup(
    cmdclass={"build_py": BuildModules},
    ext_modules=[
        Extension(
            "repertory.gpu.cpu._kernels",
            sources=[str(path) for path in SOURCES],
            depends=[str(path) for path in HEADERS],
            define_macros=[("SOURCE_HASH", f'"{source_hash()}"')],
            extra_compile_args=[
                "-O3",
                "-std=gnu11",
                "-g0",
                "-fno-math-errno",
                "-Wno-unused-function",
                "-fvisibility=hidden",
                "-pthread",
            ],
            extra_link_args=["-pthread"],
            libraries=["m"],
            optional=True,
        )
    ],
)
