"""Kernels run in Triton's interpreter here, which must be chosen before any of them is imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
