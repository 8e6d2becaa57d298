"""An engine with no model, and a way to run the command on it."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from repertory.__main__ import main
from repertory.actors.commands import generate
from repertory.protocol.errors import RepertoryError
from repertory.protocol.outputs import CompletionOutput, RequestOutput


class Terminal(io.StringIO):
    def isatty(self):
        return True


class FakeStream:
    """Outputs as a request of the given `output_kind` gets them; `act` is called before each word."""

    def __init__(self, engine, prompt, params):
        self.engine, self.prompt, self.params = engine, prompt, params
        self.closed = False
        self.finished = False

    def __aiter__(self):
        return self._outputs()

    async def aclose(self):
        self.closed = True

    async def _outputs(self):
        engine, ids = self.engine, []
        answer = engine.answer(self.prompt)
        if isinstance(answer, RepertoryError):
            raise answer
        words, end = answer
        for number, word in enumerate(words, start=1):
            await engine.act(self.prompt, number)
            ids.append(number)
            last = number == len(words)
            if self.params.output_kind == "delta":
                yield self._output(word, [number], end if last else None)
            elif last:
                yield self._output("".join(words), ids, end)
        self.finished = True

    def _output(self, text, ids, end):
        reason, stop_reason = end or (None, None)
        completions = [
            CompletionOutput(index, text * (index + 1), ids, finish_reason=reason, stop_reason=stop_reason)
            for index in range(self.params.n)
        ]
        return RequestOutput("1", None, [0] * 10, completions, finished=reason is not None, num_cached_tokens=4)


def two_words(_prompt):
    return ["Hello", " world"], ("stop", None)


async def at_once(_prompt, _number):
    await anyio.lowlevel.checkpoint()


class FakeEngine:
    """`answer(prompt)`: (words, (finish reason, stop reason)) or an error to raise. `act(prompt, n)`: before word n."""

    def __init__(self, answer: Callable = two_words, *, act: Callable = at_once, has_chat_template=False):
        self.answer, self.act, self.has_chat_template = answer, act, has_chat_template
        self.streams: list[FakeStream] = []
        self.config = None
        self.is_open = False
        self.most_at_once = 0

    def generate(self, prompt, sampling_params):
        assert self.is_open
        self.streams.append(FakeStream(self, prompt, sampling_params))
        self.most_at_once = max(self.most_at_once, sum(not stream.closed for stream in self.streams))
        return self.streams[-1]

    @asynccontextmanager
    async def open(self, config):
        self.config, self.is_open = config, True
        try:
            yield self
        finally:
            self.is_open = False


@pytest.fixture
def fake_engine():
    """The class, since test modules cannot import this one."""
    return FakeEngine


@pytest.fixture
def repertory(monkeypatch, capsys):
    """Runs `repertory generate --model demo ...` on an engine; returns (status, stdout, stderr)."""
    for name in [name for name in os.environ if name.startswith("REPERTORY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(generate, "configure_logging", lambda *_: None)  # the process's, so not a test's to set

    def run(engine, *arguments, stdin=None):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin) if stdin is not None else Terminal())
        monkeypatch.setattr(generate, "open_engine", engine.open)
        status = main(["generate", "--model", "demo", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
