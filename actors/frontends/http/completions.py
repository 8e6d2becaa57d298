"""`/v1/completions`: how its answers are written, with the prompt before them where an echo is wanted."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import UNSET

from ....protocol.outputs import CompletionOutput, RequestOutput
from .forms import Form
from .logprobs import completion_logprobs
from .off_the_loop import off_the_loop
from .requests import CompletionRequest
from .responses import CompletionChoice, CompletionLogprobs, prompt_logprobs_of

Decode = Callable[[list[int]], str]


class CompletionForm(Form):
    """Answers as texts. `decode` makes text of ids; that of a whole prompt, where it has to be made, in a thread."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self, request: CompletionRequest, request_id: str, model: str, *, decode: Decode, stream_usage: bool = False
    ) -> None:
        super().__init__(request_id, model, stream_usage=stream_usage)
        self._decode = decode
        self._num_top = request.logprobs
        self._echoes = bool(request.echo)
        self.has_output = not (self._echoes and request.max_tokens == 0)
        self._has_ids = bool(request.return_token_ids)
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        self._offsets: dict[int, int] = {}
        self._prompts: dict[int, str] = {}
        """By the number of the prompt's first choice, where an echo is wanted."""

    async def prepare(self, output: RequestOutput, first: int) -> None:
        if not self._echoes:
            return
        text = output.prompt
        if text is None:
            text = await off_the_loop(self._decode, output.prompt_token_ids)
        self._prompts[first] = text

    def beginning_of(self, output: RequestOutput, one: CompletionOutput, index: int) -> bytes:
        return self._framed(self.choice_of(output, one, index))

    def new_of(self, output: RequestOutput, one: CompletionOutput, index: int) -> CompletionChoice:
        if not self.has_output:
            one = _without_tokens(one)
        return CompletionChoice(
            index=index,
            text=one.text,
            logprobs=self._logprobs(one, index),
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
            token_ids=one.token_ids if self._has_ids else UNSET,
        )

    def choice_of(self, output: RequestOutput, one: CompletionOutput, index: int) -> CompletionChoice:
        """A whole choice, or the first part of one: with what there is to say of the prompt."""
        echoed = self._echoed_logprobs(output, index) if self._echoes else None
        choice = self.new_of(output, one, index)
        if self._echoes:
            choice.text = self._prompts[index - one.index] + choice.text
        if echoed is not None and choice.logprobs is not None:
            choice.logprobs = _joined(echoed, choice.logprobs)
        if self._has_ids:
            choice.prompt_token_ids = output.prompt_token_ids
        if self._wants_prompt_logprobs:
            choice.prompt_logprobs = prompt_logprobs_of(output)
        return choice

    def _logprobs(self, one: CompletionOutput, index: int) -> CompletionLogprobs | None:
        if self._num_top is None or one.logprobs is None:
            return None
        offset = self._offsets.get(index, 0)
        found = completion_logprobs(one.logprobs, one.token_ids, num_top=self._num_top, offset=offset, decode=self._decode)
        self._offsets[index] = offset + sum(map(len, found.tokens))
        return found

    def _echoed_logprobs(self, output: RequestOutput, index: int) -> CompletionLogprobs | None:
        if self._num_top is None or output.prompt_logprobs is None:
            return None
        found = completion_logprobs(
            output.prompt_logprobs, output.prompt_token_ids, num_top=self._num_top, offset=0, decode=self._decode
        )
        self._offsets[index] = sum(map(len, found.tokens))
        return found


def _without_tokens(one: CompletionOutput) -> CompletionOutput:
    return msgspec.structs.replace(one, text="", token_ids=[], logprobs=one.logprobs and [])


def _joined(first: CompletionLogprobs, then: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.text_offset + then.text_offset,
        first.token_logprobs + then.token_logprobs,
        first.tokens + then.tokens,
        first.top_logprobs + then.top_logprobs,
    )
