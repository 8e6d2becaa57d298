"""Prompts to token ids: text, ids, or chat messages, refused cheaply where they cannot be served.

All of this may take long and runs in worker threads. Text is encoded through
`encode_batch_fast`, even a single one: `Tokenizer.encode` keeps the GIL for its whole duration
(50 ms for 50,000 tokens), which would hold up every event loop of the process; the batch call lets go.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from ...protocol.conversation import Conversation
from ...protocol.errors import ModelLoadError, NeverFitsError, UnsupportedError, ValidationError, shorten
from ...protocol.sampling import check_token_ids
from .chat import checked_messages, load_chat_template
from .weighing import weight_of


class PromptReader:
    """Reads prompts for one model. Immutable once made: `read` may run in several threads at a time.

    `model_dir` holds `tokenizer.json`, and where the model chats `chat_template.jinja` or a template in
    `tokenizer_config.json`; `chat_template` names a file that is used instead. Ids are valid below
    `vocab_size`; a prompt must leave room for one token below `max_model_len`.

    Raises `ModelLoadError` where the tokenizer is missing or broken, `ConfigError` where the template is.
    """

    def __init__(self, model_dir: str | Path, *, chat_template: str | None = None, max_model_len: int, vocab_size: int) -> None:
        self.model_dir = model_dir = Path(model_dir)
        self.tokenizer = _load_tokenizer(model_dir / "tokenizer.json")
        """The model's tokenizer, to be shared and not changed."""
        self._template = load_chat_template(model_dir, chat_template)
        self._longest = max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self._limit(max_model_len, vocab_size)

    def within(self, *, max_model_len: int, vocab_size: int) -> PromptReader:
        """A reader of the same files for these sizes, which are the device's."""
        reader = copy.copy(self)
        reader._limit(max_model_len, vocab_size)
        return reader

    def _limit(self, max_model_len: int, vocab_size: int) -> None:
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_characters = max_model_len * self._longest

    @property
    def supports_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    @property
    def max_characters(self) -> int:
        """A text with more characters does not fit, however it is tokenized."""
        return self._max_characters

    def warm(self) -> None:
        """Do what the first chat would wait for. Slow: call it in a thread. Raises `ConfigError` for a bad template."""
        if self._template is not None:
            self._template.warm()

    def read(self, prompt: Any) -> tuple[str | None, list[int]]:
        """The prompt's text (None where ids were given; the rendered text of a chat) and its ids.

        Plain text gets the special tokens that the tokenizer adds; a rendered chat none, its template
        has written them. Raises `ValidationError` naming "prompt" or "messages"; `NeverFitsError` for one
        that is too long.
        """
        if isinstance(prompt, str):
            return prompt, self._fitting(prompt, field="prompt", add_special_tokens=True)
        if isinstance(prompt, Conversation):
            text = self.render(prompt)
            return text, self._fitting(text, field="messages", add_special_tokens=False)
        if not isinstance(prompt, (list, tuple)):
            raise ValidationError(
                f"prompt must be text, a list of token ids or a list of messages, got {shorten(prompt)}", field="prompt"
            )
        if prompt and isinstance(prompt[0], dict):
            return self.read(Conversation(list(prompt)))
        self._check_fit(len(prompt), field="prompt")
        check_token_ids(prompt, field="prompt", vocab_size=self._vocab_size)
        return None, list(prompt)

    def render(self, conversation: Conversation) -> str:
        """A chat as the model reads it. Raises `ValidationError` naming "messages" or "chat_template_kwargs"."""
        if self._template is None:
            raise UnsupportedError(
                "this model has no chat template: give its prompt as text, or set chat_template", field="messages"
            )
        if not conversation.messages:
            raise ValidationError("messages is empty", field="messages")
        checked = checked_messages(conversation.messages)
        self._check_characters(sum(len(message.get("content", "")) for message in checked), field="messages")
        # A template writes them in one go, with the interpreter's lock held.
        beside = weight_of((conversation.tools, conversation.template_kwargs), most=self._max_characters)
        self._check_characters(beside, field="tools")
        return self._template.render(
            checked,
            tools=conversation.tools,
            template_kwargs=conversation.template_kwargs,
            add_generation_prompt=conversation.add_generation_prompt,
        )

    def _fitting(self, text: str, *, field: str, add_special_tokens: bool) -> list[int]:
        encoding = self._encoding(text, field=field, add_special_tokens=add_special_tokens)
        self._check_fit(len(encoding), field=field)  # before a list of millions is made, for nothing
        token_ids: list[int] = encoding.ids
        if max(token_ids) >= self._vocab_size:
            raise ValidationError(
                f"{field} contains the token {max(token_ids)}, which the model does not have (0 to {self._vocab_size - 1})",
                field=field,
            )
        return token_ids

    def encode(self, text: str, *, add_special_tokens: bool, most: int) -> list[int]:
        """The ids of a text, be they more than fit, `most` of them. Raises `NeverFitsError` where there are more or too
        many characters, and `ValidationError` where it is no Unicode text; both name "prompt"."""
        encoding = self._encoding(text, field="prompt", add_special_tokens=add_special_tokens)
        if len(encoding) > most:
            raise NeverFitsError(f"prompt has {len(encoding)} tokens: at most {most} are listed", field="prompt")
        token_ids: list[int] = encoding.ids
        return token_ids

    def _encoding(self, text: str, *, field: str, add_special_tokens: bool) -> Encoding:
        self._check_characters(len(text), field=field)
        try:
            [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            # The tokenizer takes UTF-8, which has no lone surrogates ("\ud800" is legal JSON).
            raise ValidationError(f"{field} is not valid Unicode text", field=field) from None
        return encoding

    def _check_characters(self, num_characters: int, *, field: str) -> None:
        """Refuse before tokenizing what no tokenization can make fit: every token of it being the longest."""
        if num_characters > self._max_characters:
            raise NeverFitsError(
                f"{field} has {num_characters} characters; {self._max_model_len} tokens (max_model_len) hold "
                f"at most {self._max_characters}",
                field=field,
            )

    def _check_fit(self, num_tokens: int, *, field: str) -> None:
        if num_tokens == 0:
            raise ValidationError(f"{field} is empty", field=field)
        if num_tokens >= self._max_model_len:
            raise NeverFitsError(
                f"{field} has {num_tokens} tokens and max_model_len is {self._max_model_len}: no room for an output token",
                field=field,
            )


def _load_tokenizer(file: Path) -> Tokenizer:
    if not file.is_file():
        raise ModelLoadError(f"{file} does not exist: the model has no tokenizer", key="model")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        # The library raises a bare Exception for whatever is wrong with the file.
        raise ModelLoadError(f"{file} is not a tokenizer: {error}", key="model") from error
    # Settings from its training or export, that would silently cut prompts or fill them up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
