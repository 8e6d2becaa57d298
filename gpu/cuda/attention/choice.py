"""Which way to compute attention: the setting's, or the best that can run here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import util
from typing import NamedTuple

import torch

from ....protocol.errors import ConfigError
from .contract import AttentionBackend
from .flash2 import Flash2, why_not_flash2
from .flash3 import Flash3, why_not_flash3
from .needs import AttentionNeeds, name_of
from .torch_gather import TorchGather
from .trial import first_line, why_it_fails

BACKENDS = ("flash-attn-3", "flash-attn", "triton", "torch")
"""What `attention_backend` may name on a GPU beside "auto", which takes the first of these that can run."""


class Choice(NamedTuple):
    """The backend that was chosen, and why, in words."""

    name: str
    reason: str

    def __str__(self) -> str:
        """For the log, for instance "triton (flash-attn-3: not installed; flash-attn: not installed)"."""
        return f"{self.name} ({self.reason})"


def choose_attention(setting: str, needs: AttentionNeeds) -> Choice:
    """The backend that `setting`, of `EngineConfig.attention_backend`, comes to for `needs`.

    May import packages and try them on the device, so it takes seconds. Raises `ConfigError` for a name that is not known
    and for a backend that was named and cannot run.
    """
    if setting == "auto":
        return _best(needs)
    if setting not in BACKENDS:
        known = ", ".join(("auto", *BACKENDS))
        raise ConfigError(
            f"attention_backend {setting!r} is not known on {needs.device.type}: it has {known}", key="attention_backend"
        )
    reason = why_not(setting, needs)
    if reason is not None:
        others = ", ".join(name for name in BACKENDS if name != setting and why_not(name, needs) is None)
        raise ConfigError(
            f"attention_backend {setting!r} cannot run: {reason}. Those that can here: {others}", key="attention_backend"
        )
    return Choice(setting, "named by attention_backend")


def why_not(name: str, needs: AttentionNeeds) -> str | None:
    """Why the backend called `name`, of `BACKENDS`, cannot run, in words; None if it can."""
    return _WHY_NOT[name](needs)


def open_attention(choice: Choice, needs: AttentionNeeds, *, max_rows: int, num_sms: int) -> AttentionBackend:
    """Make the chosen backend. `max_rows` bounds the rows of a step; `num_sms` are the GPU's multiprocessors."""
    match choice.name:
        case "flash-attn-3":
            return Flash3()
        case "flash-attn":
            return Flash2()
        case "triton":
            return _open_triton(needs, max_rows=max_rows, num_sms=num_sms)
        case "torch":
            return TorchGather(needs)
    raise ValueError(f"{choice.name!r} is none of {', '.join(BACKENDS)}")


def _best(needs: AttentionNeeds) -> Choice:
    *better, last = BACKENDS
    refused: list[str] = []
    for name in better:
        reason = why_not(name, needs)
        if reason is None:
            return Choice(name, "; ".join(refused) or "nothing comes before it")
        refused.append(f"{name}: {reason}")
    return Choice(last, "; ".join(refused))


def _open_triton(needs: AttentionNeeds, *, max_rows: int, num_sms: int) -> AttentionBackend:
    from .triton_paged import HeadShape, TritonPaged

    heads = HeadShape(needs.num_heads, needs.num_kv_heads, needs.head_dim)
    return TritonPaged(heads, max_rows=max_rows, num_sms=num_sms, device=needs.device)


def _why_not_flash3(needs: AttentionNeeds) -> str | None:
    return why_not_flash3(needs) or _why_trial_fails(Flash3, needs)


def _why_not_flash2(needs: AttentionNeeds) -> str | None:
    return why_not_flash2(needs) or _why_trial_fails(Flash2, needs)


def _why_not_triton(needs: AttentionNeeds) -> str | None:
    if util.find_spec("triton") is None:
        return "not installed"
    try:
        from ..kernels.launch import INTERPRETED
    except (ImportError, OSError, RuntimeError) as error:
        return f"it cannot be imported: {first_line(error)}"
    if needs.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it computes in float32, float16 and bfloat16, not in {name_of(needs.dtype)}"
    if INTERPRETED:
        return None
    if needs.capability is None:
        return "the device is no GPU"
    if needs.capability < (8, 0):
        return "the GPU's compute capability is {}.{}, under 8.0".format(*needs.capability)
    if needs.kv_dtype == torch.float8_e4m3fn and needs.capability < (8, 9):
        return "a KV pool of float8_e4m3fn needs compute capability 8.9, not {}.{}".format(*needs.capability)
    return None


def _why_not_torch(needs: AttentionNeeds) -> str | None:
    return None


def _why_trial_fails(open_backend: Callable[[], AttentionBackend], needs: AttentionNeeds) -> str | None:
    try:
        backend = open_backend()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"it cannot be imported: {first_line(error)}"
    return why_it_fails(backend, needs)


_WHY_NOT: dict[str, Callable[[AttentionNeeds], str | None]] = {
    "flash-attn-3": _why_not_flash3,
    "flash-attn": _why_not_flash2,
    "triton": _why_not_triton,
    "torch": _why_not_torch,
}
