"""Where a configuration comes from: flags, variables `REPERTORY_*`, a YAML file, defaults.

An earlier source in that list wins. Every value is checked where it was written, so that a
mistake is reported with the flag, the variable or the place in the file, the value, and what is
allowed; nothing malformed and nothing unknown is passed over, even if another source would win.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from .config import FIELDS, SECRETS, EngineConfig, checked, converted, not_allowed, plain_type
from .errors import ConfigError, shorten

PREFIX = "REPERTORY_"

OTHER_VARIABLES = frozenset({"REPERTORY_CACHE"})
"""Variables with the prefix that are no settings: REPERTORY_CACHE is the folder for converted weights."""

TRUE_WORDS = frozenset({"true", "1", "yes", "on"})
FALSE_WORDS = frozenset({"false", "0", "no", "off"})
NONE_WORDS = frozenset({"none", "null"})

MAX_DEPTH = 8
"""Headings in headings. A YAML alias may point at its own parent, so there must be an end."""

_KEY_LINE = re.compile(r"""\s*["']?(?P<key>[A-Za-z][\w-]*)["']?\s*:(?:\s|$)""")


def load_config(
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> EngineConfig:
    """The configuration that `flags`, the variables in `environ` and `file` add up to.

    `flags` holds only what was given; keys in kebab or snake case, values typed or as text.
    `environ` is `os.environ` unless given. `defaults` stand in for the struct's own, for a command that
    wants others. Raises `ConfigError` naming the place, the value and what is allowed.
    """
    values: dict[str, Any] = dict(defaults or {})
    if file is not None:
        values.update(_from_file(file))
    values.update(_from_variables(os.environ if environ is None else environ))
    values.update(_from_flags(flags or {}))
    if "model" not in values:
        raise ConfigError("model is required: --model, REPERTORY_MODEL, or 'model:' in the file", key="model")
    return checked(EngineConfig(**values))


def _from_flags(flags: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in flags.items():
        key = _snake(name)
        if key not in FIELDS:
            raise _unknown("flag", f"--{_kebab(key)}", [f"--{_kebab(known)}" for known in FIELDS])
        yield key, typed(key, value, source=f"--{_kebab(key)}")


def _from_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    known = {PREFIX + key.upper(): key for key in FIELDS}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES:
            continue
        if name not in known:
            raise _unknown("variable", name, [*known, *OTHER_VARIABLES])
        yield known[name], typed(known[name], text, source=name)


def _from_file(file: Path) -> dict[str, Any]:
    text = _read(file)
    try:
        content = msgspec.yaml.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: must be a mapping of settings, not {shorten(content)}")
    _refuse_repeated_lines(text, file)
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for place, key, raw in _settings(content, file):
        value = typed(key, raw, source=f"{file}: {place}")
        if key in values and values[key] != value:
            raise ConfigError(f"{file}: {_both(key, places[key], values[key], place, value)}", key=key)
        values[key] = value
        places[key] = place
    return values


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{file}: cannot read the configuration file: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start})") from None


def _settings(headings: Mapping[Any, Any], file: Path, above: tuple[str, ...] = ()) -> Iterator[tuple[str, str, Any]]:
    """(place, field, raw value) of every setting below any headings. No field holds a mapping, so a mapping is a heading."""
    if len(above) > MAX_DEPTH:
        raise ConfigError(f"{file}: headings nest deeper than {MAX_DEPTH}: {'.'.join(above)}")
    for name, value in headings.items():
        path = (*above, str(name))
        if isinstance(value, dict):
            yield from _settings(value, file, path)
            continue
        key = _snake(str(name))
        if key not in FIELDS:
            raise _unknown(f"{file}: key", ".".join(path), FIELDS, word=_snake(str(name)))
        yield ".".join(path), key, value


def _refuse_repeated_lines(text: str, file: Path) -> None:
    """Refuse a setting that two lines give differently.

    Of two equal keys in one mapping the YAML parser keeps the last and says nothing. Settings are
    scalars, one to a line, so reading each line alone finds them (in block style: not inside braces).
    """
    seen: dict[str, tuple[int, Any]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        match = _KEY_LINE.match(line)
        key = _snake(match["key"]) if match else ""
        if key not in FIELDS:
            continue
        try:
            (value,) = msgspec.yaml.decode(line.strip()).values()
        except (msgspec.DecodeError, AttributeError, ValueError):
            continue  # the line means something only with its neighbours
        if value is None:
            continue  # a heading that is called like a setting, or an explicit none
        first, before = seen.setdefault(key, (number, value))
        if value != before:
            raise ConfigError(f"{file}: {_both(key, f'line {first}', before, f'line {number}', value)}", key=key)


def typed(key: str, raw: Any, *, source: str) -> Any:
    """`raw` as the field's type. Text, where the field is none, is read as what it spells."""
    if raw == "":
        raise ConfigError(f"{source} is empty; leave it out to get the default", key=key)
    if isinstance(raw, str) and plain_type(key) is not str:
        raw = _spelled(key, raw, source=source)
    return converted(key, raw, source=source)


def _spelled(key: str, text: str, *, source: str) -> Any:
    word = text.strip().lower()
    if plain_type(key) is bool:
        if word in TRUE_WORDS or word in FALSE_WORDS:
            return word in TRUE_WORDS
        raise not_allowed(key, text, source=source)
    try:
        return msgspec.convert("null" if word in NONE_WORDS else word, FIELDS[key].type, strict=False)
    except msgspec.ValidationError:
        raise not_allowed(key, text, source=source) from None


def _unknown(kind: str, name: str, known: Iterable[str], *, word: str | None = None) -> ConfigError:
    """`word` is the part of `name` to compare with what is known (default: all of it)."""
    word = word or name
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return ConfigError(f"{kind} {name} is unknown{hint}", key=word)


def _both(key: str, place: str, value: Any, other_place: str, other_value: Any) -> str:
    if key in SECRETS:
        return f"{key} is given twice, differently: {place}, {other_place}"
    return f"{key} is given twice: {shorten(value)} ({place}) and {shorten(other_value)} ({other_place})"


def _snake(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _kebab(key: str) -> str:
    return key.replace("_", "-")
