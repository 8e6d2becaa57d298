"""What all kernels share: whether they are interpreted, and the forms in which they are compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton import knobs

INTERPRETED: bool = knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on the CPU: chosen by TRITON_INTERPRET before this is imported.

Its `tl.dot` is wrong for bfloat16, so operands are widened before it there.
"""


class Variant(NamedTuple):
    """A kernel as it is compiled for some model: what `triton.compile` needs to do so without a GPU.

    `signature` has the type of each argument in Triton's spelling ("*bf16", "i32", "constexpr"), `constants` the values
    of those that are constants.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
