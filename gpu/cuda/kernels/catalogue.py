"""All kernels in all forms that are compiled ahead of time: a check that they can be, which needs no GPU."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import __path__ as _folder
from .launch import Variant

_WITHOUT_KERNELS = ("catalogue", "launch", "paged", "paged_forms")
"""The last two: what the kernels of paged attention have in common, and the forms in which they are compiled."""

_WARP_SIZE = 32


def kernel_modules() -> list[ModuleType]:
    """The modules beside this one that hold kernels, imported, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(_folder))
    return [importlib.import_module(f"{__package__}.{name}") for name in names if name not in _WITHOUT_KERNELS]


def every_variant() -> list[Variant]:
    """What all kernel modules list as their VARIANTS.

    Raises `ValueError` for a module that lists none, and for a name that is there twice.
    """
    variants: list[Variant] = []
    for module in kernel_modules():
        own: list[Variant] = getattr(module, "VARIANTS", [])
        if not own:
            raise ValueError(f"{module.__name__} has no VARIANTS: nothing would compile its kernels before a GPU does")
        variants += own
    names = [variant.name for variant in variants]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two variants are called {doubled[0]!r}")
    return variants


def compile_variant(variant: Variant, arch: int) -> int:
    """Compile for an NVIDIA GPU of compute capability `arch`, 90 for 9.0; returns the machine code's size in bytes.

    Not where kernels are interpreted. Raises what Triton raises for a kernel that cannot be compiled.
    """
    source = ASTSource(fn=variant.kernel, signature=variant.signature, constexprs=variant.constants)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, _WARP_SIZE), options=options)
    return len(compiled.asm["cubin"])
