"""What `generate` prints: results in the order of the prompts, as text under headings or as JSON lines."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...protocol.outputs import RequestOutput

HEADING_CHARACTERS = 70


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request, counted once each. `cached_tokens` of the prompt were not computed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int = 0


class Ending(msgspec.Struct, frozen=True):
    """How one of a prompt's completions came out."""

    index: int
    text: str
    finish_reason: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one prompt. `error` is the message where `finish_reason` is "error"; `refused`: the caller's fault.

    Text and reason are the first completion's; `completions` are all, where there are several.
    """

    prompt: str
    text: str = ""
    finish_reason: str = "error"
    completions: list[Ending] = []
    usage: Usage = Usage()
    error: str | None = None
    refused: bool = False


def result_of(prompt: str, output: RequestOutput) -> Result:
    """The result that a request's last output, with all of its text, stands for."""
    endings = [Ending(one.index, one.text, one.finish_reason or "abort") for one in output.outputs]
    num_prompt, num_output = len(output.prompt_token_ids), sum(len(one.token_ids) for one in output.outputs)
    failed = next((one for one in output.outputs if one.finish_reason == "error"), None)
    return Result(
        prompt=prompt,
        text=endings[0].text,
        finish_reason=endings[0].finish_reason,
        completions=endings if len(endings) > 1 else [],
        usage=Usage(num_prompt, num_output, num_prompt + num_output, output.num_cached_tokens),
        error=str(failed.stop_reason) if failed is not None else None,
    )


class Report:
    """Writes results in the order of their prompts, whatever the order they come in, beside a progress bar.

    A context manager: the bar is on `err`, where that is a terminal, from entry to exit.
    """

    def __init__(self, total: int, *, as_json: bool, out: TextIO, err: TextIO) -> None:
        self._as_json = as_json
        self._with_headings = total > 1
        self._out = out
        self._err = err
        self._waiting: dict[int, Result] = {}
        self._num_written = 0
        self._bar = Progress(
            TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=Console(file=err), transient=True, redirect_stdout=False, redirect_stderr=False,
            disable=total == 1 or not err.isatty(),
        )  # fmt: skip
        self._task = self._bar.add_task("prompts", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def add(self, index: int, result: Result) -> None:
        """Take the result of prompt `index` (from 0), and write all that are next in order."""
        self._bar.advance(self._task)
        self._waiting[index] = result
        if self._num_written not in self._waiting:
            return
        self._bar.stop()  # it is transient: this clears its line, which may be the line we write on
        while (following := self._waiting.pop(self._num_written, None)) is not None:
            self._num_written += 1
            self._write(following)
        self._out.flush()
        self._bar.start()

    def _write(self, result: Result) -> None:
        if result.error is not None:
            prefix = f"prompt {self._num_written}: " if self._with_headings else ""
            self._err.write(f"error: {prefix}{' '.join(result.error.split())}\n")
        if self._as_json:
            self._out.write(_json_line(result))
            return
        if self._with_headings:
            self._out.write(f"{'' if self._num_written == 1 else chr(10)}## {self._num_written}. {_heading(result.prompt)}\n")
        if not result.completions:
            self._write_text(result.text)
        for number, ending in enumerate(result.completions, start=1):
            self._out.write(f"{chr(10) if number > 1 else ''}### {number} of {len(result.completions)}\n")
            self._write_text(ending.text)

    def _write_text(self, text: str) -> None:
        self._out.write(text if text.endswith("\n") else text + "\n")


def _json_line(result: Result) -> str:
    usage = result.usage
    line: dict[str, Any] = {
        "prompt": result.prompt,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
    }
    if result.completions:
        line["completions"] = result.completions
    if result.error is not None:
        line["error"] = result.error
    return msgspec.json.encode(line).decode() + "\n"


def _heading(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= HEADING_CHARACTERS else line[: HEADING_CHARACTERS - 3] + "..."
