"""A chat as a prompt: the messages, and what else the model's template is told."""

from __future__ import annotations

from typing import Any

import msgspec


class Conversation(msgspec.Struct, frozen=True):
    """A prompt that the model's chat template renders. A plain list of messages is one without tools.

    `messages` are `{"role", "content"}`, content being text or a list of text parts. `tools` are OpenAI's function
    descriptions; what they mean in the prompt is the template's business. `template_kwargs` are further variables of the
    template. Without `add_generation_prompt` the prompt ends with the last message, not where the assistant speaks.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
