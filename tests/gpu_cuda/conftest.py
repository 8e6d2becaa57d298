"""Kernels run in Triton's interpreter here, which must be chosen before any of them is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"

if TYPE_CHECKING:
    from repertory.gpu.cuda.glue import Glue, TorchGlue
    from repertory.gpu.cuda.triton_glue import TritonGlue


@pytest.fixture
def torch_glue() -> TorchGlue:
    """The reference."""
    from repertory.gpu.cuda.glue import TorchGlue

    return TorchGlue()


@pytest.fixture
def triton_glue() -> TritonGlue:
    """The kernels, interpreted."""
    from repertory.gpu.cuda.triton_glue import TritonGlue

    return TritonGlue()


@pytest.fixture(params=["torch_glue", "triton_glue"])
def glue(request: pytest.FixtureRequest) -> Glue:
    """Either, for what both promise."""
    either: Glue = request.getfixturevalue(request.param)
    return either


@pytest.fixture(scope="module")
def quick_interpreter() -> Iterator[None]:
    """For kernels of many small functions: the interpreter looks through Triton's modules anew for each call of one.

    What it finds there to replace stays replaced after the first call, so the others need not look: half of the time.
    """
    from triton.runtime import interpreter

    patched: set[int] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(id(self.fn.__globals__))
        return self.rewrite()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield
