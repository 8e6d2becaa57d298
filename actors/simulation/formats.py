"""Public traces of LLM traffic, as workloads.

    mooncake    JSON lines: timestamp (ms), input_length, output_length, hash_ids of blocks of 512 tokens. An id stands
                for its block and all before it, so prompts share what their first ids have in common.
                https://github.com/kvcache-ai/Mooncake, FAST25-release/traces
    burstgpt    CSV: Timestamp (s), Request tokens, Response tokens, and columns that are not needed here.
                https://github.com/HPMLL/BurstGPT
    azure       CSV: TIMESTAMP (a date and time), ContextTokens, GeneratedTokens.
                https://github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace

In the last two nothing is known of prompts but their length, so they have nothing in common. Times begin with the first
arrival; requests are put in order of time.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...protocol.errors import ValidationError, shorten
from ...protocol.trace_reading import is_trace
from .workload import MOST_TOKENS, Job, Output, Tokens, tokens_of

MOONCAKE_BLOCK = 512


class Loaded(NamedTuple):
    """The requests of a file, and how many lines were no requests: they had failed, or said nothing."""

    format: str
    jobs: list[Job]
    num_left_out: int


class _Line(NamedTuple):
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: Sequence[int] | None = None


def detect(path: Path) -> str:
    """ "repertory" or the name of a public format, by the first line. Raises `ValidationError` where it is none of them."""
    first = _first_line(path)
    if is_trace(first):
        return "repertory"
    header = {name.strip().lower() for name in first.decode("utf-8-sig", "replace").strip().split(",")}
    if {"timestamp", "request tokens", "response tokens"} <= header:
        return "burstgpt"
    if {"timestamp", "contexttokens", "generatedtokens"} <= header:
        return "azure"
    try:
        fields = msgspec.json.decode(first)
    except msgspec.DecodeError:
        fields = None
    if isinstance(fields, dict) and {"timestamp", "input_length", "output_length"} <= fields.keys():
        return "mooncake"
    raise ValidationError(
        f"{path}: no known kind of trace: the first line is {shorten(first.decode('utf-8', 'replace'))}; "
        f"known are repertory's own, {', '.join(FORMATS)} (--format)",
        field="format",
    )


def load(path: Path, format: str) -> Loaded:
    """The requests of a file in a public format. Raises `ValidationError` with the line and the field that is wrong."""
    lines = list(FORMATS[format](path))
    kept = sorted((line for line in lines if line.num_prompt_tokens and line.num_output_tokens), key=lambda line: line.at_s)
    first_s = kept[0].at_s if kept else 0.0
    own = _Own(sum(len(line.hash_ids or ()) for line in kept) * MOONCAKE_BLOCK)
    numbers: dict[int, int] = {}
    jobs = []
    for line in kept:
        known = None if line.hash_ids is None else [numbers.setdefault(name, len(numbers)) for name in line.hash_ids]
        jobs.append(
            Job(
                arrival_s=line.at_s - first_s,
                num_prompt_tokens=line.num_prompt_tokens,
                prompt=partial(_prompt, known or (), line.num_prompt_tokens, own.take(line.num_prompt_tokens)),
                outputs=(Output(line.num_output_tokens),),
                max_tokens=line.num_output_tokens,
            )
        )
    return Loaded(format, jobs, len(lines) - len(kept))


def mooncake_lines(jobs: Iterable[Job]) -> Iterator[bytes]:
    """`jobs` as Mooncake's lines. What prompts share of less than a block of 512 tokens is lost, outputs too."""
    names: dict[tuple[int, bytes], int] = {}
    for job in jobs:
        tokens = array("i", job.prompt())
        parent, hash_ids = -1, []
        for start in range(0, len(tokens), MOONCAKE_BLOCK):
            key = (parent, tokens[start : start + MOONCAKE_BLOCK].tobytes())
            parent = names.setdefault(key, len(names))
            hash_ids.append(parent)
        fields = {
            "timestamp": round(1000 * job.arrival_s),
            "input_length": len(tokens),
            "output_length": job.outputs[0].length,
            "hash_ids": hash_ids,
        }
        yield msgspec.json.encode(fields) + b"\n"


class _Own:
    """Tokens that no block has: those that follow the last one that is named."""

    def __init__(self, first: int) -> None:
        self._next = first

    def take(self, count: int) -> int:
        """The first of `count` such tokens; they come round again after `MOST_TOKENS`."""
        start = self._next
        self._next = (self._next + count) % MOST_TOKENS
        return start % (MOST_TOKENS - count)


def _prompt(blocks: Sequence[int], length: int, own: int) -> Tokens:
    named = [(block * MOONCAKE_BLOCK % (MOST_TOKENS - MOONCAKE_BLOCK), MOONCAKE_BLOCK) for block in blocks]
    missing = max(0, length - len(blocks) * MOONCAKE_BLOCK)
    return tokens_of([*named, (own, missing)])[:length]


# ---- the formats ----------------------------------------------------------------------------------


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None


def _mooncake(path: Path) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, text in enumerate(_lines(path), start=1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _wrong(path, number, str(error)) from None
        _check(path, number, "input_length", line.input_length)
        _check(path, number, "output_length", line.output_length)
        most = math.ceil(line.input_length / MOONCAKE_BLOCK)
        if line.hash_ids is not None and len(line.hash_ids) > most:
            raise _wrong(
                path, number, f"hash_ids: {len(line.hash_ids)} blocks for {line.input_length} tokens, at most {most} fit"
            )
        yield _Line(line.timestamp / 1000, line.input_length, line.output_length, line.hash_ids)


def _burstgpt(path: Path) -> Iterator[_Line]:
    for number, row in _rows(path, "timestamp", "request tokens", "response tokens"):
        at_s = _number(path, number, row, "timestamp")
        prompt, output = (int(_number(path, number, row, name)) for name in ("request tokens", "response tokens"))
        yield _Line(at_s, prompt, output)


def _azure(path: Path) -> Iterator[_Line]:
    for number, row in _rows(path, "timestamp", "contexttokens", "generatedtokens"):
        try:
            at = datetime.fromisoformat(row["timestamp"].strip())
        except ValueError:
            raise _wrong(path, number, f"TIMESTAMP: {shorten(row['timestamp'])} is no date and time") from None
        at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        prompt, output = (int(_number(path, number, row, name)) for name in ("contexttokens", "generatedtokens"))
        yield _Line(at.timestamp(), prompt, output)


FORMATS: dict[str, Callable[[Path], Iterator[_Line]]] = {"mooncake": _mooncake, "burstgpt": _burstgpt, "azure": _azure}
"""Readers by name."""


# ---- lines and fields -----------------------------------------------------------------------------


def _rows(path: Path, *needed: str) -> Iterator[tuple[int, Mapping[str, str]]]:
    """(line number, value by column in lower case) of a CSV file that has the `needed` columns."""
    text = (line.decode("utf-8-sig", "replace") for line in _lines(path))
    reader = csv.reader(text)
    names = [name.strip().lower() for name in next(reader, [])]
    missing = [name for name in needed if name not in names]
    if missing:
        raise _wrong(path, 1, f"there is no column {missing[0]!r} among {', '.join(names) or 'none'}")
    for row in reader:
        if not row:
            continue
        if len(row) < len(names):
            raise _wrong(path, reader.line_num, f"{len(row)} columns where the header has {len(names)}")
        yield reader.line_num, dict(zip(names, row, strict=False))


def _number(path: Path, number: int, row: Mapping[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    _check(path, number, name, value)
    return value


def _check(path: Path, number: int, name: str, value: float) -> None:
    if not 0 <= value < MOST_TOKENS:
        raise _wrong(path, number, f"{name}: {value} is not allowed; expected a number from 0 to {MOST_TOKENS - 1}")


def _wrong(path: Path, number: int, what: str) -> ValidationError:
    return ValidationError(f"{path}, line {number}: {what}", field="trace")


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise ValidationError(f"{path}: {error.strerror or error}", field="trace", value=str(path)) from None


def _first_line(path: Path) -> bytes:
    return next(_lines(path), b"")
