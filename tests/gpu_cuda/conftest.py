"""Kernels run in Triton's interpreter here, which must be chosen before any of them is imported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

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
