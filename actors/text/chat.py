"""The model's chat template: messages to the text the model was trained on.

The template is Jinja, written for `transformers`, so `transformers` renders it: the filters, globals and
sandbox it offers are part of the format. Only its renderer is used, not its tokenizers, and it is
imported by name at first need: half a second that `warm` takes at start, in a thread.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from ...protocol.errors import ConfigError, ModelLoadError, ValidationError, shorten

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_RESERVED = frozenset(
    [
        *("conversations", "messages", "tools", "documents", "chat_template", "return_assistant_tokens_mask"),
        *("continue_final_message", "add_generation_prompt"),
    ]
)
"""What the renderer itself takes: a request's variables may not stand in its place, its template least of all."""


class ChatTemplate:
    """One template with the special tokens it may name. Safe to use from several threads."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._source = source
        self._special_tokens = special_tokens

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text, up to where the assistant speaks, or (without `add_generation_prompt`) the last message's end.

        `template_kwargs` are further variables of the template. Raises `ValidationError` where one has a name that is
        taken, and with the template's own message where it refuses the messages.
        """
        if taken := _RESERVED & (template_kwargs or {}).keys():
            raise ValidationError(f"chat_template_kwargs may not set {min(taken)}", field="chat_template_kwargs")
        try:
            return self._render(messages, tools, template_kwargs or {}, add_generation_prompt)
        except Exception as error:
            # A template is a program: what its expressions raise on these messages is theirs to mend.
            raise ValidationError(
                f"the chat template refused the messages: {str(error) or type(error).__name__}", field="messages"
            ) from error

    def warm(self) -> None:
        """Import the renderer and compile the template. Raises `ConfigError` where it is no valid Jinja."""
        try:
            self._render([{"role": "user", "content": "hi"}], None, {}, True)
        except Exception as error:
            # Any other refusal is about this one message: some templates want a system message first.
            if type(error).__name__ == "TemplateSyntaxError":
                raise ConfigError(f"the chat template is not valid: {error}", key="chat_template") from error

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        renderer = importlib.import_module("transformers.utils.chat_template_utils")
        rendered, _ = renderer.render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self._source,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **template_kwargs},
        )
        return str(rendered[0])


def load_chat_template(model_dir: Path, override: str | None) -> ChatTemplate | None:
    """The template file `override`, or the model's `chat_template.jinja`, or the one in its tokenizer's
    configuration; None where there is none.

    Raises `ConfigError` (key "chat_template") where `override` cannot be read, `ModelLoadError` where
    the model's own files are broken.
    """
    settings = _tokenizer_settings(model_dir)
    special_tokens = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(settings.get(name))) is not None}
    if override is not None:
        return ChatTemplate(_read_override(Path(override)), special_tokens)
    own_file = model_dir / "chat_template.jinja"
    source = own_file.read_text(encoding="utf-8") if own_file.is_file() else _configured(settings.get("chat_template"))
    return None if source is None else ChatTemplate(source, special_tokens)


def checked_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Chat messages with each content as plain text: lists of text parts are joined by newlines.

    Raises `ValidationError` (field "messages") naming the position of one that is no message.
    """
    return [_checked_message(message, f"messages[{position}]") for position, message in enumerate(messages)]


def _checked_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValidationError(f"{name} must be an object with role and content, got {shorten(message)}", field="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValidationError(f"{name}.role must be a non-empty string, got {shorten(role)}", field="messages")
    # As the renderer's callers do: what is null is not there, many templates would print it.
    present = {key: value for key, value in message.items() if value is not None}
    content = present.get("content")
    if isinstance(content, str):
        return present
    if isinstance(content, (list, tuple)):
        present["content"] = "\n".join(_part_text(part, f"{name}.content[{i}]") for i, part in enumerate(content))
        return present
    if content is None and present.get("tool_calls"):
        return present
    raise ValidationError(f"{name}.content must be text or a list of text parts, got {shorten(content)}", field="messages")


def _part_text(part: Any, name: str) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ValidationError(f'{name} must be {{"type": "text", "text": ...}}, got {shorten(part)}', field="messages")


def _tokenizer_settings(model_dir: Path) -> dict[str, Any]:
    file = model_dir / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}", key="model") from error
    return settings if isinstance(settings, dict) else {}


def _read_override(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {str(file)!r} cannot be read: {error}", key="chat_template") from error


def _configured(value: Any) -> str | None:
    """A template setting: one template, or a list of named ones of which "default" is used."""
    if isinstance(value, list):
        value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
