"""`/v1/chat/completions`: how its answers are written."""

from __future__ import annotations

from msgspec import UNSET

from ....protocol.outputs import CompletionOutput, RequestOutput
from .forms import Form
from .logprobs import chat_logprobs
from .requests import ChatRequest
from .responses import Answer, ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatMessage, Usage, prompt_logprobs_of


class ChatForm(Form):
    """Answers as an assistant's messages."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, request_id: str, model: str, *, stream_usage: bool = False) -> None:
        super().__init__(request_id, model, stream_usage=stream_usage)
        self._num_top = (request.top_logprobs or 0) if request.logprobs else None
        self._has_ids = bool(request.return_token_ids)

    def beginning_of(self, output: RequestOutput, one: CompletionOutput, index: int) -> bytes:
        role = ChatChunkChoice(index=index, delta=ChatDelta("", "assistant"))
        more = {"prompt_token_ids": output.prompt_token_ids} if self._has_ids else {}
        return self._framed(role, **more) + self._framed(self.new_of(output, one, index))

    def new_of(self, output: RequestOutput, one: CompletionOutput, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=ChatDelta(one.text) if one.text or not one.finish_reason else ChatDelta(),
            logprobs=self._logprobs(one),
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason if one.finish_reason else UNSET,
            token_ids=one.token_ids if self._has_ids else UNSET,
        )

    def choice_of(self, output: RequestOutput, one: CompletionOutput, index: int) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=ChatMessage(one.text),
            logprobs=self._logprobs(one),
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
            token_ids=one.token_ids if self._has_ids else UNSET,
        )

    def whole(self, outputs: list[RequestOutput], usage: Usage) -> Answer:
        answer = super().whole(outputs, usage)
        [output] = outputs
        if self._has_ids:
            answer.prompt_token_ids = output.prompt_token_ids
        if (found := prompt_logprobs_of(output)) is not None:
            answer.prompt_logprobs = found
        return answer

    def _logprobs(self, one: CompletionOutput) -> ChatLogprobs | None:
        if self._num_top is None or one.logprobs is None:
            return None
        return chat_logprobs(one.logprobs, one.token_ids, num_top=self._num_top)
