"""Drives transformers' `generate`: a static batch, and for workload C the shared prefix by hand."""

from __future__ import annotations

import argparse
import time
from importlib.metadata import version
from itertools import takewhile
from typing import Any

import torch
from driving import Arrivals, Channel, Job
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):
    """Notes when each token comes. The first thing it is given is the prompt."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.arrivals: Arrivals = []
        self._had_prompt = False

    def put(self, value: Any) -> None:
        """A token, or the prompt."""
        if self._had_prompt:
            self.arrivals.append((time.perf_counter() - self.began, 1))
        self._had_prompt = True

    def end(self) -> None:
        """Nothing to do."""


def greedy(max_tokens: int) -> GenerationConfig:
    """Answers of exactly `max_tokens` tokens."""
    return GenerationConfig(
        max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=2
    )


@torch.inference_mode()
def run(model: Any, job: Job) -> dict[str, Any]:
    """All prompts are of one length, so a batch of them has no padding."""
    prompts = torch.tensor(job.prompts)
    began = time.perf_counter()
    if len(job.prompts) == 1:
        clock = Clock()
        model.generate(prompts, generation_config=greedy(job.max_tokens), streamer=clock)
        return {"seconds": time.perf_counter() - began, "arrivals": [clock.arrivals]}
    cache = shared_prefix(model, job) if job.name == "C" else None
    mask = torch.ones_like(prompts)
    model.generate(prompts, attention_mask=mask, cache=cache, generation_config=greedy(job.max_tokens))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "arrivals": [[(seconds, job.max_tokens)] for _ in job.prompts]}


def shared_prefix(model: Any, job: Job) -> DynamicCache:
    """The KV of the tokens that all prompts begin with, computed once and repeated for each."""
    columns = zip(*job.prompts, strict=True)
    length = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    cache = DynamicCache(config=model.config)
    model(torch.tensor([job.prompts[0][:length]]), cache=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(len(job.prompts))
    return cache


def main() -> None:
    """The driver: `drive_transformers.py MODEL`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--budget", type=int, help="not used: there are no steps to bound")
    options = parser.parse_args()
    channel = Channel()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    channel.say(ready=f"transformers {version('transformers')}")
    for job in channel.jobs():
        channel.answer(job, run(model, job))


if __name__ == "__main__":
    main()
