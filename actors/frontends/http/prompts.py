"""From a body's `prompt` or `messages` to what the engine reads. Nothing here looks into a prompt: its text may be long."""

from __future__ import annotations

import json
from typing import Any

from ....protocol.conversation import Conversation
from ....protocol.errors import ValidationError, shorten
from ..face import Prompt
from .requests import ChatRequest, TokenizeRequest

MAX_PROMPTS = 256
"""Prompts of one completion request."""
MAX_TOOLS = 512
MAX_ARGUMENTS = 65_536
"""Characters of a call's arguments that are read as JSON; longer ones stay text."""
_TOOL_CHOICES = ("none", "auto", "required")


def prompts_of(prompt: Any) -> list[Prompt]:
    """The prompts of a completion request: text, ids, a list of texts, or a list of lists of ids.

    Raises `ValidationError` (field "prompt") for anything else. Ids are checked where they are read.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise _no_prompt(prompt)
    if not prompt:
        raise ValidationError("prompt is empty", field="prompt")
    kind = type(prompt[0])
    if kind not in (str, list):
        if kind is dict:
            raise _no_prompt(prompt[0])
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise ValidationError(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(prompt)}", field="prompt")
    for position, one in enumerate(prompt):
        if type(one) is not kind or (kind is list and any(isinstance(token, dict) for token in one[:1])):
            raise ValidationError(
                f"prompt[{position}] must be {'text' if kind is str else 'a list of token ids'} as the first one is, "
                f"got {shorten(one)}",
                field="prompt",
            )
    return list(prompt)


def conversation_of(request: ChatRequest | TokenizeRequest) -> Conversation:
    """The chat that a request asks about. Raises `ValidationError` naming the field.

    With `tool_choice` "none" the template sees no tools; any other choice is a variable of the template.
    """
    if request.messages is None:
        raise ValidationError("messages is missing", field="messages")
    tools = _checked_tools(request.tools or [])
    choice = request.tool_choice
    if choice is not None:
        _check_choice(choice, tools)
    variables = dict(request.chat_template_kwargs or {})
    if choice is not None and choice != "none":
        variables.setdefault("tool_choice", choice)
    return Conversation(
        messages=[_with_read_arguments(message) for message in request.messages],
        tools=tools if tools and choice != "none" else None,
        template_kwargs=variables,
        add_generation_prompt=request.add_generation_prompt is not False,
    )


def _no_prompt(prompt: Any) -> ValidationError:
    return ValidationError(
        f"prompt must be text, a list of token ids, or a list of either, got {shorten(prompt)}", field="prompt"
    )


def _checked_tools(tools: list[Any]) -> list[dict[str, Any]]:
    if len(tools) > MAX_TOOLS:
        raise ValidationError(f"tools may hold at most {MAX_TOOLS} tools, got {len(tools)}", field="tools")
    for position, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function" or _name_of(tool) is None:
            raise ValidationError(
                f'tools[{position}] must be {{"type": "function", "function": {{"name": ...}}}}, got {shorten(tool)}',
                field="tools",
            )
    return tools


def _check_choice(choice: str | dict[str, Any], tools: list[dict[str, Any]]) -> None:
    if choice in _TOOL_CHOICES:
        if choice == "required" and not tools:
            raise ValidationError("tool_choice is required and there are no tools", field="tool_choice")
        return
    name = _name_of(choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    if name is None:
        raise ValidationError(
            f"tool_choice must be none, auto, required or a function by name, got {shorten(choice)}", field="tool_choice"
        )
    if name not in map(_name_of, tools):
        raise ValidationError(f"tool_choice names {shorten(name)}, which is none of the tools", field="tool_choice")


def _name_of(tool: dict[str, Any]) -> str | None:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def _with_read_arguments(message: Any) -> Any:
    """Calls of tools as templates expect them: arguments as an object, where OpenAI's clients send its JSON as text."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, list) or not calls:
        return message
    return {**message, "tool_calls": list(map(_read_call, calls))}


def _read_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    if len(text) > MAX_ARGUMENTS:
        return call  # reading it would hold everybody up
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return call  # what a model once wrote need not be JSON: the template gets it as it stands
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
