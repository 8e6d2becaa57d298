"""`repertory generate`: prompts in, text out. One prompt streams; several run together and come in order."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TextIO

import anyio
import msgspec
from cyclopts import Group, Parameter

from ...protocol.config import EngineConfig
from ...protocol.config_sources import load_config
from ...protocol.errors import RequestError, RequestFailedError, ValidationError
from ...protocol.outputs import RequestOutput
from ...protocol.sampling import SamplingParams, check
from ..observing.logs import configure_logging
from .engine_flags import GROUPS, ConfigFile, engine_flags
from .prompts import Prompt, as_messages, read_prompts
from .results import Report, Result, result_of

_PROMPTS = Group("Prompts", sort_key=1)
_OUTPUT = Group("Output", sort_key=2)
_SAMPLING = Group("Sampling", sort_key=3)
_FILE_HELP = "file with one prompt a line; -: standard input"
_CHAT_HELP = "give each prompt as a user's message, or as it is [default: --chat where the model has a chat template]"
_JSON_HELP = "one JSON line per prompt: prompt, text, finish_reason, usage; with --n, the texts of all completions too"
_DEFAULTS = {"log_level": "warning"}
"""Settings whose defaults differ here: the lines of a run that goes well would stand between the reader and the text."""
_ANY_VOCABULARY = 2**31 - 1

if TYPE_CHECKING:
    from ..frontends.engine import Engine

    EngineFlags = dict[str, Any]
else:
    # A served engine's settings mean nothing here, and --seed is the requests' own.
    EngineFlags = engine_flags(without=(*GROUPS["Serving"], "seed"), defaults=_DEFAULTS)


class OutputStream(Protocol):
    """A request's outputs; closing it aborts the request."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    async def aclose(self) -> None: ...


class TextEngine(Protocol):
    """What this verb needs of an engine."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can be given chat messages."""
        ...

    def generate(self, prompt: Prompt, sampling_params: SamplingParams) -> OutputStream:
        """Start a request."""
        ...


EngineFactory = Callable[[EngineConfig], AbstractAsyncContextManager[TextEngine]]


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are chosen; names and meanings are `SamplingParams`'."""

    n: Annotated[int, Parameter(help="completions of each prompt")] = 1
    max_tokens: Annotated[int, Parameter(help="tokens to generate at most, for each completion")] = 64
    temperature: Annotated[float, Parameter(help="0 is greedy")] = 1.0
    top_p: Annotated[float, Parameter(help="keep the likeliest tokens that make up this share")] = 1.0
    top_k: Annotated[int, Parameter(help="keep this many of the likeliest tokens; 0: all")] = 0
    min_p: Annotated[float, Parameter(help="drop tokens below this share of the likeliest one's probability")] = 0.0
    seed: Annotated[int | None, Parameter(help="makes the output repeatable")] = None
    stop: Annotated[
        list[str] | None,
        Parameter(help="text that ends the output; may be given again", negative="", allow_leading_hyphen=True),
    ] = None
    ignore_eos: Annotated[bool, Parameter(help="go on when the model says it is done", negative="", show_default=False)] = False

    def params(self, output_kind: Any) -> SamplingParams:
        """As parameters of a request. Raises `ValidationError` naming the field that is out of range."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        params = SamplingParams(**fields, output_kind=output_kind)
        check(params, vocab_size=_ANY_VOCABULARY)
        return params


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to generate and how to show it. `chat` None: chat messages where the model has a template."""

    prompts: list[str]
    sampling: SamplingFlags = SamplingFlags()
    chat: bool | None = None
    system: str | None = None
    as_json: bool = False

    @property
    def streams(self) -> bool:
        """Whether text is shown while it comes."""
        return len(self.prompts) == 1 and self.sampling.n == 1 and not self.as_json


def generate(
    *prompts: Annotated[str, Parameter(help="texts to go on from, or to answer", group=_PROMPTS)],
    file: Annotated[Path | None, Parameter(help=_FILE_HELP, allow_leading_hyphen=True, group=_PROMPTS)] = None,
    chat: Annotated[bool | None, Parameter(help=_CHAT_HELP, negative="--raw", group=_PROMPTS)] = None,
    system: Annotated[str | None, Parameter(help="system message before each prompt", group=_PROMPTS)] = None,
    as_json: Annotated[bool, Parameter(name="--json", help=_JSON_HELP, negative="", show_default=False, group=_OUTPUT)] = False,
    sampling: Annotated[SamplingFlags | None, Parameter(name="*", group=_SAMPLING)] = None,
    config: ConfigFile = None,
    engine: Annotated[EngineFlags | None, Parameter(name="*")] = None,
) -> int:
    """Generate text for one prompt or many.

    Prompts are arguments, lines of --file, or all of standard input as one. A single prompt's text
    is written as it comes; several prompts or completions run together, and come in order under headings.
    """
    settings = load_config(flags=engine or {}, file=config, defaults=_DEFAULTS)
    sampling = sampling or SamplingFlags()
    sampling.params("delta")
    if system is not None and chat is False:
        raise ValidationError("--system needs chat messages: it cannot be used with --raw", field="system")
    job = Job(prompts=read_prompts(prompts, file), sampling=sampling, chat=chat, system=system, as_json=as_json)
    configure_logging(settings.log_format, settings.log_level)
    return anyio.run(partial(run, job, settings, factory=open_engine))


def open_engine(config: EngineConfig) -> AbstractAsyncContextManager[Engine]:
    """An engine that is open inside `async with`."""
    from ..frontends.engine import Engine  # brings the model's libraries with it

    return Engine(config)


async def run(
    job: Job, config: EngineConfig, *, factory: EngineFactory, out: TextIO | None = None, err: TextIO | None = None
) -> int:
    """Do `job` on an engine from `factory`; return the exit status: 0, 1 if one failed inside, 2 if one was refused.

    Raises what the engine raises at its start or death, and for a single streamed prompt its refusal.
    """
    out, err = out or sys.stdout, err or sys.stderr
    async with factory(config) as engine:
        as_chat = engine.has_chat_template if job.chat is None else job.chat
        if job.system is not None and not as_chat:
            raise ValidationError("--system needs a model with a chat template", field="system")
        prompts = [as_messages(prompt, job.system) if as_chat else prompt for prompt in job.prompts]
        if job.streams:
            await _stream(engine.generate(prompts[0], job.sampling.params("delta")), out)
            return 0
        with Report(len(prompts), as_json=job.as_json, out=out, err=err) as report:
            # No more at once than may wait: the engine refuses what is over its queue.
            return await _run_all(job, prompts, engine, report, limit=config.max_num_queued)


async def _stream(stream: OutputStream, out: TextIO) -> None:
    text = ""
    async with aclosing(stream):
        async for output in stream:
            completion = output.outputs[0]
            text = completion.text or text
            out.write(completion.text)
            out.flush()
            if completion.finish_reason == "error":
                raise RequestFailedError(str(completion.stop_reason))
    if not text.endswith("\n"):
        out.write("\n")


async def _run_all(job: Job, prompts: list[Prompt], engine: TextEngine, report: Report, *, limit: int) -> int:
    params = job.sampling.params("final_only")
    limiter = anyio.CapacityLimiter(limit)
    results: list[Result] = []

    async def one(index: int) -> None:
        async with limiter:
            result = await _finish(engine, job.prompts[index], prompts[index], params)
        results.append(result)
        report.add(index, result)

    async with anyio.create_task_group() as tasks:
        for index in range(len(prompts)):
            tasks.start_soon(one, index)
    if any(result.error is not None and not result.refused for result in results):
        return 1
    return 2 if any(result.refused for result in results) else 0


async def _finish(engine: TextEngine, text: str, prompt: Prompt, params: SamplingParams) -> Result:
    last: RequestOutput | None = None
    try:
        async with aclosing(engine.generate(prompt, params)) as stream:
            async for output in stream:
                last = output
    except RequestError as error:
        return Result(prompt=text, error=str(error), refused=True)
    return result_of(text, last) if last is not None else Result(prompt=text, error="the request ended without an output")
