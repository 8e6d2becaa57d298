"""What the drivers share: jobs come in on stdin, answers go out on stdout, a line of JSON each.

Standard library only, and imported as a sibling: each driver runs in its own engine's environment.

    asked      {"workload": "A", "repetition": 0, "small": false}
    answered   {"seconds": 9.1, "prompt_tokens": 256, "arrivals": [[[0.4, 1], [0.5, 1], ...], ...]}

`arrivals` has a list for each request: when output came (seconds since all were submitted) and how many
tokens it was; `prompt_tokens` are one prompt's. Workload E also has `arrived_s` and `answered_s`, of the long
prompt. A driver says `{"ready": "name version"}` first; an engine that fails writes to stderr and ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

WORKLOADS = Path(__file__).parents[3] / "actors/commands/benching/workloads.py"
PREFILL_TOKENS = 512
SMALL_TOKENS = 4
SMALL_PROMPT = 16
SMALL_LONG_PROMPT = 64

Arrivals = list[tuple[float, int]]


class Job(NamedTuple):
    """A workload as an engine gets it. `long_prompt` arrives when every stream has had `tokens_before` tokens."""

    name: str
    prompts: list[list[int]]
    max_tokens: int
    long_prompt: list[int]
    tokens_before: int


def load_workloads() -> ModuleType:
    """The engine's own workloads, read by path: other engines' environments do not have the package."""
    spec = importlib.util.spec_from_file_location("workloads", WORKLOADS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = module
    spec.loader.exec_module(module)
    return module


def job_of(request: dict[str, Any]) -> Job:
    """The job that a line asks for. `small` makes of any workload one of seconds."""
    workloads = load_workloads()
    name, repetition = request["workload"], request["repetition"]
    if name == "P":  # prefill alone, as D, of a prompt that a step of the default budget holds
        prompts, max_tokens = [workloads.token_ids(PREFILL_TOKENS, 80_000 + repetition)], 1
    else:
        kinds = {"A": "offline", "B": "latency", "C": "prefix", "D": "ttft", "E": "itl_streams"}
        workload = getattr(workloads, kinds[name])(repetition)
        prompts, max_tokens = workload.prompts, workload.max_tokens
    long_prompt = workloads.itl_long_prompt(repetition) if name == "E" else []
    if not request.get("small"):
        return Job(name, prompts, max_tokens, long_prompt, tokens_before=32)
    keep = SMALL_PROMPT if name != "C" else len(prompts[0])  # what C shares is its point
    prompts = [prompt[:keep] for prompt in prompts[:2]]
    max_tokens = 40 if name == "E" else min(max_tokens, SMALL_TOKENS)
    return Job(name, prompts, max_tokens, long_prompt[:SMALL_LONG_PROMPT], tokens_before=SMALL_TOKENS)


class Channel:
    """This process's end. Whatever else prints to stdout goes to stderr from now on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, **words: Any) -> None:
        """Send a line."""
        print(json.dumps(words), file=self._out, flush=True)

    def answer(self, job: Job, reply: dict[str, Any]) -> None:
        """Send what came of a job."""
        self.say(**reply, prompt_tokens=len(job.prompts[0]))

    def next_request(self) -> dict[str, Any] | None:
        """Wait for a line; None when there will be no more."""
        line = sys.stdin.readline()
        return dict(json.loads(line)) if line.strip() else None

    def jobs(self) -> Iterator[Job]:
        """Jobs until the other end closes."""
        while (request := self.next_request()) is not None:
            yield job_of(request)
