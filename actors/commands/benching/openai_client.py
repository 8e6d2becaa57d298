"""A client of `/v1/completions` that notes when each piece of an answer came. Any OpenAI-compatible server will do.

httpx2 comes with transformers' hub client; it is imported when a server is measured, and only then.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from ....protocol.errors import ConfigError, EngineError, RepertoryError, ValidationError, shorten
from .metrics import Timeline

if TYPE_CHECKING:
    import httpx2

CONNECT_TIMEOUT_S = 30.0
LONGEST_ERROR = 300
"""Characters of an answer that are quoted where it is no answer."""


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class CompletionClient:
    """Sends prompts of token ids to one server, and returns timelines."""

    def __init__(self, http: httpx2.AsyncClient, model: str, *, ignore_eos: bool) -> None:
        self._http = http
        self.model = model
        self._extra = {"ignore_eos": True} if ignore_eos else {}

    async def complete(self, prompt: list[int], max_tokens: int) -> Timeline:
        """Stream one greedy answer. What goes wrong with it is in the timeline's `error`."""
        import httpx2

        timeline = Timeline(sent_s=time.perf_counter(), num_prompt=len(prompt))
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        try:
            async with self._http.stream("POST", "completions", json=body) as response:
                if response.status_code != 200:
                    timeline.error = f"status {response.status_code}: {_message(await response.aread())}"
                else:
                    await _read(response.aiter_bytes(), timeline)
        except httpx2.HTTPError as error:
            timeline.error = f"{type(error).__name__}: {error}"
        except msgspec.DecodeError as error:
            timeline.error = f"not a completion: {error}"
        return timeline


@asynccontextmanager
async def open_client(
    base_url: str, *, model: str | None = None, api_key: str | None = None, ignore_eos: bool = True
) -> AsyncIterator[CompletionClient]:
    """A client of the server at `base_url`, with or without `/v1`. `model` None: the first that the server names.

    Raises `ValidationError` for what is no URL, `EngineError` where no server answers, `ConfigError`
    where httpx2 is missing.
    """
    if find_spec("httpx2") is None:
        raise ConfigError("bench serve needs httpx2: pip install httpx2")
    import httpx2

    url = _checked_url(base_url)
    async with httpx2.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        # An answer may wait for long in the server's queue: only connecting has an end.
        timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
    ) as http:
        yield CompletionClient(http, model or await _first_model(http, url), ignore_eos=ignore_eos)


def _checked_url(base_url: str) -> str:
    import httpx2

    try:
        url = httpx2.URL(base_url)
    except httpx2.InvalidURL as error:
        raise ValidationError(f"--base-url: {shorten(base_url)}: {error}", field="base_url") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValidationError(f"--base-url: {shorten(base_url)} is no http:// or https:// address", field="base_url")
    return base_url.rstrip("/").removesuffix("/v1") + "/v1/"


async def _first_model(http: httpx2.AsyncClient, url: str) -> str:
    import httpx2

    try:
        response = await http.get("models")
        if response.status_code != 200:
            raise EngineError(f"{url}models: status {response.status_code}: {_message(response.content)}")
        return str(response.json()["data"][0]["id"])
    except httpx2.HTTPError as error:
        raise EngineError(f"{url}: {type(error).__name__}: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise EngineError(f"{url}models names no model: give --model") from None


async def _read(pieces: AsyncIterator[bytes], timeline: Timeline) -> None:
    """Take in an answer's server-sent events. Tokens are counted by its usage; without one, by its events."""
    num_events, is_over = 0, False
    async for data in _events(pieces):
        if data == b"[DONE]":
            is_over = True
            continue
        chunk = msgspec.json.decode(data, type=_Chunk)
        if chunk.error is not None:
            timeline.error = _message(data)
            return
        if chunk.usage is not None:
            timeline.num_output = chunk.usage.completion_tokens
            timeline.num_cached = int((chunk.usage.prompt_tokens_details or {}).get("cached_tokens") or 0)
        for choice in chunk.choices[:1]:
            is_over = is_over or choice.finish_reason is not None
            if choice.text or not choice.finish_reason:  # else it only says how the answer ended
                num_events += 1
                timeline.at_s.append(time.perf_counter())
    timeline.num_output = timeline.num_output or num_events
    if not is_over or not timeline.at_s:
        timeline.error = "the stream ended without an end" if not is_over else "the answer was empty"


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The `data:` of each event. Lines end at line feeds only: what else looks like a line's end may be in a text."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for data in _data(lines):
            yield data
    for data in _data([rest]):
        yield data


def _data(lines: Iterable[bytes]) -> Iterable[bytes]:
    return (line[5:].strip() for line in lines if line.startswith(b"data:"))


def _message(body: bytes) -> str:
    """OpenAI's `error.message`, or the beginning of whatever came instead."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, LookupError, TypeError):
        return " ".join(body[:LONGEST_ERROR].decode(errors="replace").split()) or "no message"


def refusal(timeline: Timeline) -> RepertoryError | None:
    """The error to raise for a first request that failed; None where it did not."""
    return None if timeline.error is None else EngineError(f"the test request failed: {timeline.error}")
