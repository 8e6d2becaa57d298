"""The same weights for everybody: the demo model in bf16, as a model directory and as GGUF.

They are made of the same file: bf16 is rounded from the same float32 numbers in both.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def bf16_directory(source: Path, target: Path) -> Path:
    """A copy of a model directory with its float weights in bf16, made once."""
    if target.is_dir():
        return target
    work = target.with_name(f".{target.name}-{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(source, work, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = json.loads((source / "config.json").read_text())
    (work / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}, indent=1))
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(source / WEIGHTS).items()}
    save_file(weights, work / WEIGHTS, metadata={"format": "pt"})
    work.rename(target)  # complete under its final name, or not there
    return target


def bf16_gguf(source: Path, target: Path, *, programs: Path) -> Path:
    """A copy of a GGUF file with its matrices in bf16, made once by llama.cpp's own program."""
    if target.is_file():
        return target
    work = target.with_name(f".{os.getpid()}-{target.name}")
    command = [str(programs / "llama-quantize"), "--allow-requantize", str(source), str(work), "BF16", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    work.rename(target)
    return target


def weight_bytes(directory: Path) -> int:
    """Bytes of all weights: what a step for one sequence has to read."""
    return sum(tensor.nbytes for tensor in load_file(directory / WEIGHTS).values())
