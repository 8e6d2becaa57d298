"""Where the prompts of a command come from: arguments, a file with one a line, or standard input as one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from ...protocol.errors import ValidationError

Prompt = str | list[dict[str, Any]]


def read_prompts(arguments: Sequence[str], file: Path | None, stdin: TextIO | None = None) -> list[str]:
    """The arguments, then the lines of `file` that are not blank (`-`: of standard input).

    With neither, and where standard input is no terminal, all of it is one prompt. Raises
    `ValidationError` where there is no prompt at all, the file cannot be read, or text is not UTF-8.
    """
    stdin = stdin or sys.stdin
    prompts = list(arguments)
    if file is not None:
        text = _read(stdin, "standard input") if str(file) == "-" else _read(file, str(file))
        prompts += [line for line in text.split("\n") if line.strip()]
    elif not prompts and not stdin.isatty():
        prompts += [text] if (text := _read(stdin, "standard input").removesuffix("\n")) else []
    if not prompts:
        raise ValidationError("no prompt: give one as an argument, --file, or on standard input", field="prompts")
    for number, prompt in enumerate(prompts, start=1):
        _check_unicode(prompt, f"prompt {number}")
    return prompts


def as_messages(prompt: str, system: str | None) -> list[dict[str, Any]]:
    """`prompt` as a user's chat message, after the system's if there is one."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": prompt}]


def _read(source: Path | TextIO, name: str) -> str:
    try:
        return source.read_text(encoding="utf-8-sig") if isinstance(source, Path) else source.read()
    except OSError as error:
        raise ValidationError(f"{name}: {error.strerror or error}", field="file") from None
    except UnicodeDecodeError as error:
        raise ValidationError(f"{name}: not UTF-8 text (byte {error.start})", field="file") from None


def _check_unicode(text: str, name: str) -> None:
    """Bytes of the command line that are not UTF-8 arrive as lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValidationError(f"{name} is not UTF-8 text (character {error.start})", field="prompts") from None
