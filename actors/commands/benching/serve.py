"""`repertory bench serve`: a load for any OpenAI-compatible server."""

from __future__ import annotations

import math
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import anyio
from cyclopts import Parameter

from ....protocol.errors import ValidationError
from . import plot, server_load, show
from .arrivals import random_prompts, shared_prefix_prompts
from .flags import LOAD, OUTPUT, Output, OutputFlags, at_least_one, checked_output
from .metrics import Timeline, latencies_ms, parse_objectives
from .openai_client import CompletionClient, open_client, refusal

_DATASET_HELP = "prompts with nothing in common, or groups that share their beginning"
_GOODPUT_HELP = "objectives in ms, as ttft:200 tpot:50 e2el:2000: count what meets all of them"
_EOS_HELP = "ask for all of --output-len; --no-ignore-eos for servers that refuse the field"
MOST_ERRORS = 3


@dataclass(frozen=True)
class LoadFlags:
    """What is sent, and how fast."""

    num_prompts: Annotated[int, Parameter(help="requests to send")] = 100
    request_rate: Annotated[float, Parameter(help="requests a second, as a Poisson process; inf: all at once")] = math.inf
    max_concurrency: Annotated[int | None, Parameter(help="requests under way at most")] = None
    dataset: Annotated[Literal["random", "shared-prefix"], Parameter(help=_DATASET_HELP)] = "random"
    input_len: Annotated[int, Parameter(help="tokens of a prompt, beside what it shares")] = 256
    output_len: Annotated[int, Parameter(help="tokens to generate for each")] = 64
    num_groups: Annotated[int, Parameter(help="groups of shared-prefix")] = 8
    shared_len: Annotated[int, Parameter(help="tokens that a group of shared-prefix shares")] = 1024
    vocab_size: Annotated[int, Parameter(help="prompts are ids below this: the model must have them")] = 32_000
    ignore_eos: Annotated[bool, Parameter(help=_EOS_HELP)] = True
    seed: Annotated[int, Parameter(help="of prompts and arrivals")] = 0

    def load(self) -> server_load.Load:
        """The prompts and their times. Raises `ValidationError` naming the flag that is out of range."""
        for name in ("num_prompts", "input_len", "output_len", "num_groups", "shared_len", "vocab_size"):
            at_least_one(getattr(self, name), name)
        if self.max_concurrency is not None:
            at_least_one(self.max_concurrency, "max_concurrency")
        if not self.request_rate > 0:
            raise ValidationError(f"--request-rate must be above 0, or inf, got {self.request_rate}", field="request_rate")
        return server_load.Load(self._prompts(), self.output_len, self.request_rate, self.max_concurrency, self.seed)

    def _prompts(self) -> list[list[int]]:
        if self.dataset == "random":
            return random_prompts(self.num_prompts, self.input_len, seed=self.seed, vocab_size=self.vocab_size)
        return shared_prefix_prompts(
            self.num_prompts,
            self.input_len,
            num_groups=self.num_groups,
            shared_len=self.shared_len,
            seed=self.seed,
            vocab_size=self.vocab_size,
        )


def serve(
    *,
    base_url: Annotated[str, Parameter(help="where the server is, with or without /v1", group=LOAD)] = "http://127.0.0.1:8000",
    model: Annotated[str | None, Parameter(help="its name there [default: the first it lists]", group=LOAD)] = None,
    api_key: Annotated[str | None, Parameter(help="bearer key", group=LOAD, env_var="OPENAI_API_KEY")] = None,
    load: Annotated[LoadFlags | None, Parameter(name="*", group=LOAD)] = None,
    goodput: Annotated[
        list[str] | None, Parameter(help=_GOODPUT_HELP, consume_multiple=True, negative="", group=OUTPUT)
    ] = None,
    output: Output = None,
) -> int:
    """Load an OpenAI-compatible server and report what `vllm bench serve` does.

    Prompts are random token ids, so no tokenizer is needed. One request is sent first and not counted. The exit
    status is 1 if any request failed.
    """
    load, output, objectives_ms = load or LoadFlags(), checked_output(output), parse_objectives(goodput or [])
    wanted = load.load()
    opening = open_client(base_url, model=model, api_key=api_key, ignore_eos=load.ignore_eos)
    timelines, duration_s = anyio.run(_send, wanted, opening)
    found = {"benchmark": "serve", "base_url": base_url, **server_load.results(wanted, timelines, duration_s, objectives_ms)}
    _show(found, timelines, output)
    return 1 if found["failed"] else 0


async def _send(load: server_load.Load, opening: AbstractAsyncContextManager[CompletionClient]) -> tuple[list[Timeline], float]:
    async with opening as client:
        # Backwards, so that it leaves nothing in a prefix cache that the first prompt would find.
        failure = refusal(await client.complete(load.prompts[0][::-1], load.output_len))
        if failure is not None:
            raise failure
        with show.progress("requests", len(load.prompts), sys.stderr) as advance:
            return await server_load.send(load, client, advance)


def _show(found: dict[str, Any], timelines: list[Timeline], output: OutputFlags) -> None:
    if output.as_json:
        show.write_json(found, sys.stdout)
    else:
        sys.stdout.write(server_load.layout(found) + "\n")
    for error in found["errors"][:MOST_ERRORS]:
        sys.stderr.write(f"error: {error}\n")
    if output.plot is not None:
        names = server_load.SECTIONS
        panels = [plot.Panel(names[key][0], "ms", {"": values}) for key, values in latencies_ms(timelines).items()]
        plot.draw(output.plot, f"{found['base_url']}: {len(timelines)} requests", panels)
