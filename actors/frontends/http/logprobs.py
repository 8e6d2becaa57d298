"""Log-probabilities in OpenAI's two shapes: columns for completions, objects for chats.

In the engine's form each token has a dictionary by token id: of the token itself and of the most likely ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ....protocol.outputs import Logprob
from .responses import LOWEST_LOGPROB, ChatLogprob, ChatLogprobs, ChatTopLogprob, CompletionLogprobs

Entry = Mapping[int, Logprob] | None
"""Of one token; None of the first of a prompt, which follows nothing."""


def completion_logprobs(
    entries: Iterable[Entry], token_ids: Iterable[int], *, num_top: int, offset: int, decode: Callable[[list[int]], str]
) -> CompletionLogprobs:
    """The columns of `token_ids`. `offset`: characters of the choice before the first; `decode` tells a token's text where
    the entry does not."""
    found = CompletionLogprobs([], [], [], [])
    for token_id, entry in zip(token_ids, entries, strict=True):
        own = None if entry is None else entry[token_id]
        text = decode([token_id]) if own is None else _text(own)
        found.text_offset.append(offset)
        found.tokens.append(text)
        found.token_logprobs.append(None if own is None else _value(own))
        found.top_logprobs.append(None if entry is None or own is None else _most_likely(entry, own, num_top))
        offset += len(text)
    return found


def chat_logprobs(entries: Iterable[Mapping[int, Logprob]], token_ids: Iterable[int], *, num_top: int) -> ChatLogprobs:
    """An object for each of `token_ids`."""
    return ChatLogprobs([_of_chat(entry, entry[token], num_top) for token, entry in zip(token_ids, entries, strict=True)])


def _of_chat(entry: Mapping[int, Logprob], own: Logprob, num_top: int) -> ChatLogprob:
    text = _text(own)
    top = [ChatTopLogprob(_text(one), _value(one), _bytes(_text(one))) for one in _ranked(entry, num_top)]
    return ChatLogprob(text, _value(own), _bytes(text), top)


def _most_likely(entry: Mapping[int, Logprob], own: Logprob, num_top: int) -> dict[str, float]:
    """By text, the chosen token always among them: two tokens of one text count as the likelier."""
    found: dict[str, float] = {}
    for one in [*_ranked(entry, num_top), own]:
        found.setdefault(_text(one), _value(one))
    return found


def _ranked(entry: Mapping[int, Logprob], num_top: int) -> list[Logprob]:
    """The `num_top` most likely ones, in falling order: not the chosen one where it is not among them."""
    ranked = [one for one in entry.values() if one.rank is not None and one.rank <= num_top]
    return sorted(ranked, key=lambda one: one.rank or 0)


def _text(one: Logprob) -> str:
    return one.decoded_token or ""


def _value(one: Logprob) -> float:
    return max(one.logprob, LOWEST_LOGPROB)


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", errors="replace"))
