"""The models, and the reference's answers, computed once a session."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from repertory.gpu.models.config import load_model_config
from repertory.tests.tiny_model import make_tiny_model

from .prompts import PROMPTS, RealPrompt
from .reference import CAN_READ_GGUF, continuations, generated, load_demo_file, load_directory, proven
from .running import Case

NUM_TOKENS = 48
NUM_TINY_TOKENS = 24


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run in several processes, those that need the reference share one: it takes a minute to make."""
    for item in items:
        if "reference_model" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("transformers"))


@pytest.fixture(scope="session", params=["reference from GGUF" if CAN_READ_GGUF else "reference from converted"])
def reference_model(demo_model: Path) -> Any:
    """The demo model in transformers, float32: from the file itself where it can be read, else as converted.

    The two are bit for bit the same, which `tests/gpu/test_gguf.py` proves. The tests' names say which it was.
    """
    return load_demo_file() if CAN_READ_GGUF else load_directory(demo_model)


@pytest.fixture(scope="session")
def real_cases(demo_model: Path, reference_model: Any) -> list[Case]:
    """The real prompts, tokenized and continued by transformers."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model)
    ids = [_token_ids(tokenizer, prompt) for prompt in PROMPTS]
    eos = load_model_config(demo_model).eos_token_ids
    answers = continuations(reference_model, ids, NUM_TOKENS)
    return [
        Case(real.name, real.prompt, answer, stop_ids=() if real.ignore_eos else eos, ignore_eos=real.ignore_eos)
        for real, answer in zip(PROMPTS, answers, strict=True)
    ]


def _token_ids(tokenizer: Any, real: RealPrompt) -> list[int]:
    if isinstance(real.prompt, str):
        return tokenizer(real.prompt).input_ids
    text = tokenizer.apply_chat_template(real.prompt, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False).input_ids


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that both the C kernels and torch can compute."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_cases(tiny_model: Path) -> list[Case]:
    """Prompts that share prefixes of many lengths, block boundaries among them; one is another's whole, one a twin."""
    generator = random.Random(11)
    trunk = generator.choices(range(3, 318), k=48)
    prompts = [trunk[:shared] + generator.choices(range(3, 318), k=own) for shared, own in _SHAPES]
    prompts += [trunk[:16], list(prompts[1]), prompts[1] + generator.choices(range(3, 318), k=9)]
    model = load_directory(tiny_model)
    cases = []
    for number, prompt in enumerate(prompts):
        [token_ids] = generated(model, [prompt], NUM_TINY_TOKENS)
        # Of half of them some token of the answer ends it.
        stop_ids = (token_ids[17],) if number % 2 else ()
        cases.append(Case(f"tiny {number}", prompt, proven(model, prompt, token_ids), stop_ids=stop_ids))
    return cases


_SHAPES = [(0, 1), (32, 7), (32, 16), (33, 2), (15, 4), (16, 1), (48, 3), (47, 1)]
"""Tokens of the trunk that a prompt begins with, and tokens of its own."""
