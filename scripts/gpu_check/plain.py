"""A Llama in plain torch, which the engine is held against: no cache, no pages, nothing fused, nothing of the package's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


class Continued(NamedTuple):
    """Greedy continuations of some prompts, and for each the smallest distance by which a token of it won."""

    token_ids: list[list[int]]
    least_gaps: list[float]


class PlainLlama:
    """The model of a directory with `config.json` and `model.safetensors`, rotary embedding without scaling."""

    def __init__(self, directory: Path, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        config = json.loads((directory / "config.json").read_text())
        self._num_layers: int = config["num_hidden_layers"]
        self._num_heads: int = config["num_attention_heads"]
        self._num_kv_heads: int = config["num_key_value_heads"]
        self._head_dim: int = config["head_dim"]
        self._eps: float = config["rms_norm_eps"]
        self._theta: float = config["rope_theta"]
        loaded = load_file(directory / "model.safetensors")
        self._weights = {name: weight.to(device=device, dtype=dtype) for name, weight in loaded.items()}
        self._device = device

    @torch.inference_mode()
    def logits(self, token_ids: Tensor | list[list[int]], *, last: int | None = None) -> Tensor:
        """[sequences, tokens, vocab_size]: what follows on each token, or the `last` ones, of sequences of one length."""
        tokens = torch.as_tensor(token_ids, device=self._device)
        hidden = F.embedding(tokens, self._weights["model.embed_tokens.weight"])
        for layer in range(self._num_layers):
            name = f"model.layers.{layer}"
            hidden = hidden + self._attention(f"{name}.self_attn", self._norm(f"{name}.input_layernorm", hidden))
            hidden = hidden + self._mlp(f"{name}.mlp", self._norm(f"{name}.post_attention_layernorm", hidden))
        head = self._weights.get("lm_head.weight", self._weights["model.embed_tokens.weight"])
        return F.linear(self._norm("model.norm", hidden[:, -(last or hidden.shape[1]) :]), head)

    @torch.inference_mode()
    def continued(self, prompts: list[list[int]], num_tokens: int) -> Continued:
        """The likeliest `num_tokens` tokens after each of some prompts of one length, every one computed from the beginning."""
        tokens = torch.tensor(prompts, device=self._device)
        least = torch.full((len(prompts),), float("inf"), device=self._device, dtype=torch.float64)
        for _ in range(num_tokens):
            top = self.logits(tokens, last=1)[:, 0].topk(2, dim=-1)
            least = torch.minimum(least, (top.values[:, 0] - top.values[:, 1]).double())
            tokens = torch.cat((tokens, top.indices[:, :1]), dim=1)
        continuations: list[list[int]] = tokens[:, -num_tokens:].tolist()
        gaps: list[float] = least.tolist()
        return Continued(continuations, gaps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (wide.square().mean(-1, keepdim=True) + self._eps).rsqrt()
        return (wide * scale).to(x.dtype) * self._weights[f"{name}.weight"]

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = self._linear(f"{name}.gate_proj", x), self._linear(f"{name}.up_proj", x)
        return self._linear(f"{name}.down_proj", F.silu(gate) * up)

    def _attention(self, name: str, x: Tensor) -> Tensor:
        """Softmax of the scaled products, written out."""
        query = self._rotated(self._heads(f"{name}.q_proj", x))
        key = self._rotated(self._heads(f"{name}.k_proj", x))
        value = self._heads(f"{name}.v_proj", x)
        group = self._num_heads // self._num_kv_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = query @ key.transpose(-1, -2) * self._head_dim**-0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
        attended = weights.to(x.dtype) @ value
        return self._linear(f"{name}.o_proj", attended.transpose(1, 2).flatten(2))

    def _heads(self, name: str, x: Tensor) -> Tensor:
        """[sequences, heads, tokens, head_dim]."""
        return self._linear(name, x).view(*x.shape[:2], -1, self._head_dim).transpose(1, 2)

    def _rotated(self, heads: Tensor) -> Tensor:
        """Pairs (i, i + head_dim / 2) turned by position / theta^(2i / head_dim) (Su et al. 2021, 2104.09864)."""
        exponents = torch.arange(0, self._head_dim, 2, dtype=torch.float32, device=self._device) / self._head_dim
        angles = torch.arange(heads.shape[2], dtype=torch.float32, device=self._device)[:, None] / self._theta**exponents
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        low, high = heads.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
