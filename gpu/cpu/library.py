"""The C kernels' library: found, checked and opened with ctypes, which drops the GIL for each call.

The structs are those of `kernels/repertory.h`, field by field. A library that was built from other
sources than the ones beside it is not used: its structs may differ, and so may its results.
"""

from __future__ import annotations

import ctypes
import hashlib
import sysconfig
from ctypes import c_char_p, c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

ABI = 3

LEVELS = ("portable", "avx2", "avx512", "amx")
"""Instruction sets in rising order, by the number that the C side knows them by."""

PHASES = (
    "embed",
    "norms",
    "qkv",
    "rope + KV",
    "shared",
    "decodes",
    "chunks",
    "attention out",
    "gate up",
    "down",
    "head",
    "sample",
)
"""What `Step.seconds` is divided into."""

STATE_EXTRA = 16
"""Floats behind the values in the state of a query head whose softmax is open."""

_HERE = Path(__file__).parent


class KernelsUnavailableError(Exception):
    """There is no library, or none that fits; the message says why."""


class Linear(ctypes.Structure):
    """`Linear`: y from x and packed weights."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("m", c_int64),
        ("weights", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("epilogue", c_int64),
    )


class Attention(ctypes.Structure):
    """`Attention`: one layer of the pool and the heads that look at it."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("token_stride", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("queries", c_void_p),
        ("query_stride", c_int64),
        ("output", c_void_p),
        ("state", c_void_p),
    )


class Run(ctypes.Structure):
    """`Run`: query rows against one run of keys."""

    _fields_ = (
        ("table", c_void_p),
        ("keys", c_int64),
        ("num_tokens", c_int64),
        ("members", c_void_p),
        ("decodes", c_void_p),
        ("token", c_int64),
        ("first_limit", c_int64),
        ("kv_head", c_int64),
        ("first_query", c_int64),
        ("last_query", c_int64),
    )


class Rotation(ctypes.Structure):
    """`Rotation`: queries and keys to rotate, and where keys and values go."""

    _fields_ = (
        ("qkv", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("slots", c_void_p),
        ("rotation", c_void_p),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
    )


class Layer(ctypes.Structure):
    """`Layer`: addresses of one layer's weights."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("qkv", c_void_p),
        ("attention_out", c_void_p),
        ("post_attention_norm", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
    )


class Model(ctypes.Structure):
    """`Model`: shape, weights, pool and buffers."""

    _fields_ = (
        ("level", c_int64),
        ("is_bf16", c_int64),
        ("num_layers", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("vocab", c_int64),
        ("eps", c_double),
        ("layers", c_void_p),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("lm_head", c_void_p),
        ("pool", c_void_p),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("layer_stride", c_int64),
        ("value_offset", c_int64),
        ("token_stride", c_int64),
        ("x", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("attended", c_void_p),
        ("inner", c_void_p),
        ("scratch", c_void_p),
        ("scratch_bytes", c_int64),
    )


class Step(ctypes.Structure):
    """`Step`: one step's rows, and where its results go."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_decodes", c_int64),
        ("num_chunks", c_int64),
        ("num_groups", c_int64),
        ("num_samples", c_int64),
        ("token_ids", c_void_p),
        ("slots", c_void_p),
        ("rotation", c_void_p),
        ("tables", c_void_p),
        ("decodes", c_void_p),
        ("chunks", c_void_p),
        ("groups", c_void_p),
        ("members", c_void_p),
        ("sample_at", c_void_p),
        ("state", c_void_p),
        ("logits", c_void_p),
        ("tokens", c_void_p),
        ("finite", c_void_p),
        ("best", c_void_p),
        ("seconds", c_double * len(PHASES)),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "abi_version": (c_int64, ()),
    "source_hash": (c_char_p, ()),
    "has_kernels": (c_int64, (c_int64, c_int64)),
    "panel_columns": (c_int64, (c_int64, c_int64)),
    "scratch_bytes": (c_int64, (c_int64,) * 5),
    "pack": (None, (c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64)),
    "run_linear": (None, (c_int64, c_int64, c_void_p, c_void_p)),
    "run_rms_norm": (None, (c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_double)),
    "run_rotate": (None, (c_int64, c_int64, c_void_p, c_int64)),
    "run_attend_decodes": (None, (c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p)),
    "run_attend_run": (None, (c_int64, c_int64, c_void_p, c_void_p, c_void_p)),
    "run_largest": (c_double, (c_int64, c_void_p, c_int64, c_void_p)),
    "run_step": (None, (c_void_p, c_void_p, c_void_p)),
    "run_head": (None, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "sample_floats": (c_int64, (c_int64,)),
    "run_sample": (None, (c_int64, c_void_p, c_void_p)),
    "team_open": (c_void_p, (c_int64,)),
    "team_close": (None, (c_void_p,)),
    "read_memory": (c_int64, (c_void_p, c_int64)),
    "copy_blocks": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64)),
}


def open_library(directory: Path = _HERE) -> ctypes.CDLL:
    """The library in `directory`. Raises `KernelsUnavailableError`: not built, not loadable, or built from other sources."""
    path = directory / f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.is_file():
        raise KernelsUnavailableError("the C kernels are not built (no C compiler when this was installed?)")
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise KernelsUnavailableError(f"the C kernels do not load: {error}") from error
    expected = _source_hash(directory / "kernels")
    if library.abi_version() != ABI or (expected and library.source_hash().decode() != expected):
        raise KernelsUnavailableError("the C kernels were built from other sources; install the package again")
    return library


def level_for(library: ctypes.CDLL, dtype: torch.dtype, name: str = "auto") -> int:
    """The number of level `name` for weights of `dtype`; auto: the highest this CPU has, portable C excepted.

    Raises `KernelsUnavailableError` where there is none: the portable kernels are slower than torch.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise KernelsUnavailableError(f"the C kernels compute float32 and bfloat16, not {str(dtype).removeprefix('torch.')}")
    wanted = range(len(LEVELS) - 1, 0, -1) if name == "auto" else (LEVELS.index(name),)
    for level in wanted:
        if library.has_kernels(level, dtype is torch.bfloat16):
            return level
    needed = "AVX2" if name == "auto" else name
    raise KernelsUnavailableError(f"this CPU, or the C kernels' build, has no {needed} for {str(dtype).removeprefix('torch.')}")


def _source_hash(directory: Path) -> str:
    """Digest of the sources, as setup.py computes it; empty where they are not installed."""
    sources = sorted((path for path in directory.glob("*.[ch]")), key=lambda path: path.name)
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest() if sources else ""
