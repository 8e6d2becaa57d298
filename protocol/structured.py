"""What the text of an answer must look like: a JSON schema, a regular expression, a list of choices, or a grammar.

Here only its form and size are checked, for a fixed cost. Whether it compiles is found out where prompts are read,
off every event loop (`gpu/structured.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from .errors import ValidationError, shorten

MAX_GRAMMAR_CHARACTERS = 65_536
"""Of a schema's text, of a grammar, of all choices together. With the compiler's own limits it bounds what one costs."""
MAX_REGEX_CHARACTERS = 16_384
MAX_CHOICES = 2_048
MAX_SCHEMA_DEPTH = 100

FIELD = "structured_outputs"


class StructuredOutputs(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A constraint on the text of an answer; exactly one field is set. The names are vLLM's `StructuredOutputsParams`.

    - `json`: a JSON schema, as text or as an object. Between the parts of the value the model may write some white
      space: at most one line break and 32 blanks at a time, since without a bound it may write nothing else.
    - `json_object`: true for any JSON object.
    - `regex`: matched against the whole answer, in the syntax of Rust's `regex` crate, without look-around.
    - `choice`: the answer is one of these strings.
    - `grammar`: a context-free grammar in Lark's syntax (a rule `start`), or in llama.cpp's GBNF (a rule `root`).

    The end token is masked until the answer satisfies the constraint, and is the only one left when nothing may follow;
    the request then ends with "stop". `max_tokens` and stop strings may cut the answer before. With `ignore_eos`, and
    while there are fewer than `min_tokens`, the end token is masked for as long as anything else may follow.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def check_structured_outputs(wanted: Any) -> None:
    """Refuse anything but a `StructuredOutputs` with one field set, of bounded size.

    Raises `ValidationError` naming the field. Costs no more than a fixed amount, however large the values are.
    """
    if not isinstance(wanted, StructuredOutputs):
        raise ValidationError(f"{FIELD} must be StructuredOutputs, not {type(wanted).__name__}", field=FIELD)
    if wanted.json_object is not None and not isinstance(wanted.json_object, bool):
        raise _bad(wanted, "json_object", "true or false")
    given = [name for name in wanted.__struct_fields__ if getattr(wanted, name) not in (None, False)]
    if len(given) != 1:
        names = ", ".join(wanted.__struct_fields__)
        raise ValidationError(f"{FIELD} must set exactly one of {names}; got {', '.join(given) or 'none'}", field=FIELD)
    if isinstance(wanted.json, dict):
        _check_schema_size(wanted.json)
    elif wanted.json is not None:
        _check_text(wanted, "json", MAX_GRAMMAR_CHARACTERS)
    if wanted.regex is not None:
        _check_text(wanted, "regex", MAX_REGEX_CHARACTERS)
    if wanted.grammar is not None:
        _check_text(wanted, "grammar", MAX_GRAMMAR_CHARACTERS)
    if wanted.choice is not None:
        _check_choices(wanted)


def _check_text(wanted: StructuredOutputs, name: str, limit: int) -> None:
    text = getattr(wanted, name)
    if not isinstance(text, str) or not 1 <= len(text) <= limit:
        raise _bad(wanted, name, f"text of 1 to {limit} characters")
    _check_unicode(text, name)


def _check_choices(wanted: StructuredOutputs) -> None:
    choices = wanted.choice
    if not isinstance(choices, (list, tuple)) or not 1 <= len(choices) <= MAX_CHOICES:
        raise _bad(wanted, "choice", f"a list of 1 to {MAX_CHOICES} strings")
    room = MAX_GRAMMAR_CHARACTERS
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise ValidationError(f"{FIELD}.choice must hold strings that are not empty, got {shorten(choice)}", field=FIELD)
        room -= len(choice)
        if room < 0:
            raise ValidationError(f"{FIELD}.choice must be of at most {MAX_GRAMMAR_CHARACTERS} characters", field=FIELD)
        _check_unicode(choice, "choice")


def _check_unicode(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValidationError(f"{FIELD}.{name} is not valid Unicode text", field=FIELD) from None


def _check_schema_size(schema: dict[str, Any]) -> None:
    """Walk the object only as far as its text may be long; one that contains itself is too deep."""
    room = MAX_GRAMMAR_CHARACTERS
    left: list[tuple[Any, int]] = [(schema, 0)]
    while left:
        value, depth = left.pop()
        if isinstance(value, (dict, list, tuple, str)):
            room -= len(value)
        room -= 1
        if room < 0:
            raise ValidationError(f"{FIELD}.json must be of at most {MAX_GRAMMAR_CHARACTERS} characters", field=FIELD)
        if depth > MAX_SCHEMA_DEPTH:
            raise ValidationError(f"{FIELD}.json must be at most {MAX_SCHEMA_DEPTH} levels deep", field=FIELD)
        if isinstance(value, dict):
            left += [(part, depth + 1) for item in value.items() for part in item]
        elif isinstance(value, (list, tuple)):
            left += [(part, depth + 1) for part in value]


def _bad(wanted: StructuredOutputs, name: str, allowed: str) -> ValidationError:
    value = getattr(wanted, name)
    return ValidationError(f"{FIELD}.{name} must be {allowed}, got {shorten(value)}", field=FIELD, value=value)
