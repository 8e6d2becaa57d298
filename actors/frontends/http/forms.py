"""How an endpoint's answers are written: what completions and chats have in common.

A stream's events differ in their choices only, so the rest of each is encoded once for a request and a token costs one
choice: about a microsecond.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from ....protocol.outputs import CompletionOutput, RequestOutput
from .responses import Answer, Usage
from .sending import encode


class Form(ABC):
    """One answer of one endpoint. `stream_usage`: events tell of a usage, which is null until the last.

    Choices are numbered over all prompts: the completions of a prompt begin at `first`.
    """

    prefix: ClassVar[str]
    """Of the answer's id."""
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    has_output = True
    """Whether what is generated is part of the answer."""

    def __init__(self, request_id: str, model: str, *, stream_usage: bool = False) -> None:
        self.id = f"{self.prefix}-{request_id}"
        self.model = model
        self.created = int(time.time())
        head = {"id": self.id, "object": self.chunk_object, "created": self.created, "model": model}
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._stream_usage = stream_usage
        self._tail = b',"usage":null}\n\n' if stream_usage else b"}\n\n"
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    async def prepare(self, output: RequestOutput, first: int) -> None:  # noqa: B027 - most have nothing to prepare
        """Called with the first output of each prompt, before it is written: for what takes long."""

    def events(self, output: RequestOutput, first: int) -> bytes:
        """What is new of a prompt's completions, as events; empty where nothing is."""
        if len(output.outputs) == 1:
            return self._event(output, output.outputs[0], first)
        return b"".join(self._event(output, one, first + one.index) for one in output.outputs)

    def _event(self, output: RequestOutput, one: CompletionOutput, index: int) -> bytes:
        if index in self._ended or not (one.token_ids or one.text or one.finish_reason is not None):
            return b""
        if one.finish_reason is not None:
            self._ended.add(index)
        if index in self._begun:
            return self._framed(self.new_of(output, one, index))
        self._begun.add(index)
        return self.beginning_of(output, one, index)

    def _framed(self, choice: msgspec.Struct, **more: Any) -> bytes:
        """A choice as an event; `more` stands beside the choices."""
        extra = b"," + encode(more)[1:-1] if more else b""
        return b"".join((self._head, encode(choice), b"]", extra, self._tail))

    def usage_event(self, usage: Usage) -> bytes:
        """The last event of a stream that tells its usage; empty where none is told."""
        if not self._stream_usage:
            return b""
        return b"".join((self._head, b'],"usage":', encode(usage), b"}\n\n"))

    def whole(self, outputs: list[RequestOutput], usage: Usage) -> Answer:
        """The whole answer, of all prompts in their order."""
        choices: list[msgspec.Struct] = []
        for output in outputs:
            first = len(choices)
            choices += [self.choice_of(output, one, first + one.index) for one in output.outputs]
        return Answer(
            id=self.id, object=self.whole_object, created=self.created, model=self.model, choices=choices, usage=usage
        )

    # ---- what the endpoints say ------------------------------------------------------------------

    def beginning_of(self, output: RequestOutput, one: CompletionOutput, index: int) -> bytes:
        """The first events of a choice, with what is new of it."""
        return self._framed(self.new_of(output, one, index))

    @abstractmethod
    def new_of(self, output: RequestOutput, one: CompletionOutput, index: int) -> msgspec.Struct:
        """What is new of a choice."""

    @abstractmethod
    def choice_of(self, output: RequestOutput, one: CompletionOutput, index: int) -> msgspec.Struct:
        """A whole choice."""
