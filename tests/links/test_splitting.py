"""A step's tokens go to the frontends whose requests they are for: each gets all of its own and nothing else."""

from __future__ import annotations

import random

import pytest

from repertory.actors.links.splitting import split
from repertory.protocol.ids import RequestId
from repertory.protocol.messages import Open, PromptLogprobs, SequenceEnd, TokenLogprobs, TokensSampled
from repertory.protocol.sampling import SamplingParams


def id_of(incarnation: int, number: int) -> RequestId:
    return RequestId(incarnation << 32 | number)


def opening(request_id: RequestId) -> Open:
    return Open(request_id, [1], SamplingParams(), 1, 0, 0.0, 0.0)


def test_a_message_for_one_frontend_is_passed_on_as_it_is() -> None:
    message = TokensSampled([id_of(7, 1), id_of(7, 2)], [5, 6], 1.0, opened=[opening(id_of(7, 2))])
    assert split(message)[7] is message
    assert list(split(message)) == [7]


def test_a_message_for_nobody_goes_to_nobody() -> None:
    assert split(TokensSampled([], [], 1.0)) == {}


@pytest.mark.parametrize("column", ["opened", "ended", "preempted"])
def test_a_frontend_without_tokens_still_hears_of_its_requests(column: str) -> None:
    told = {
        "opened": opening(id_of(8, 1)),
        "ended": SequenceEnd(id_of(8, 1), "abort"),
        "preempted": (id_of(8, 1), 3),
    }[column]
    parts = split(TokensSampled([id_of(7, 1)], [5], 1.0, **{column: [told]}))
    assert set(parts) == {7, 8}
    assert getattr(parts[8], column) == [told]
    assert getattr(parts[7], column) == []
    assert (parts[7].token_ids, parts[8].token_ids) == ([5], [])


@pytest.mark.parametrize("seed", range(20))
def test_every_column_is_split_alike_and_in_order(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(1, 40)
    ids = [id_of(draw.randrange(3), draw.randrange(1, 5)) for _ in range(count)]
    tokens = [draw.randrange(1000) for _ in range(count)]
    indices = [draw.randrange(4) for _ in range(count)] if seed % 2 else []
    logprobs = [draw.choice([None, TokenLogprobs([token], [-1.0], 1)]) for token in tokens] if seed % 3 else []
    ended = [SequenceEnd(request_id, "stop") for request_id in ids[::3]]
    parts = split(TokensSampled(ids, tokens, 2.5, ended=ended, indices=indices, logprobs=logprobs))
    for owner in range(3):
        rows = [row for row, request_id in enumerate(ids) if request_id >> 32 == owner]
        if owner not in parts:
            assert not rows
            continue
        part = parts[owner]
        assert part.request_ids == [ids[row] for row in rows]
        assert part.token_ids == [tokens[row] for row in rows]
        assert part.indices == ([indices[row] for row in rows] if indices else [])
        assert part.logprobs == ([logprobs[row] for row in rows] if logprobs else [])
        assert part.ended == [end for end in ended if end.request_id >> 32 == owner]
        assert part.sampled_s == 2.5


def test_every_column_of_a_message_is_split() -> None:
    """One that is added and forgotten here would be lost whenever two frontends have tokens in one step."""
    ids = [id_of(7, 1), id_of(8, 1)]
    entry = TokenLogprobs([5], [-0.5], 1)
    whole = TokensSampled(
        ids,
        [5, 6],
        1.0,
        opened=[opening(request_id) for request_id in ids],
        ended=[SequenceEnd(request_id, "stop") for request_id in ids],
        preempted=[(request_id, 1) for request_id in ids],
        indices=[1, 2],
        logprobs=[entry, entry],
        prompts=[PromptLogprobs(request_id, [entry]) for request_id in ids],
    )
    parts = split(whole)
    for name in TokensSampled.__struct_fields__:
        if name != "sampled_s":
            assert [len(getattr(part, name)) for part in parts.values()] == [1, 1], name
