"""21, over HTTP. An id the model does not have is refused by name, as JSON's numbers and keys can write it."""

from __future__ import annotations

from typing import Any

import pytest

from repertory.tests.engine.stage import answer_of, greedy, prompt_of
from repertory.tests.http.served import error_of

VOCAB = 320
BAD = [VOCAB, VOCAB + 1, -1, 2**63, 10**100, 1.5, True, None, "5", [5], {}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: repr(bad)[:24])
async def test_a_prompt_with_a_bad_id_is_refused_by_name_and_disturbs_nobody(served: Any, bad: Any, stream: bool) -> None:
    s = await served(block_size=4)
    s.stage.gate.shut()
    running = s.stage.begin(prompt_of(9), greedy(10))
    await s.stage.gate.arrival()
    for prompt in ([5, 6, 7, bad], [[5, 6], [7, bad]], [[bad]]):
        error = error_of(await s.complete(prompt, stream=stream), 400)
        assert error["param"] == "prompt"
        assert len(error["message"]) < 300
        if type(bad) is int and bad < 10**30:
            assert str(bad) in error["message"]
    stats = await s.engine.stats()
    assert stats.num_running == 1
    s.stage.gate.open()
    assert answer_of(await running) == s.stage.alone(prompt_of(9), greedy(10))
    await s.check_clean()


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: repr(bad)[:24])
async def test_a_list_of_ids_with_a_bad_one_is_refused_by_name(served: Any, field: str, bad: Any) -> None:
    s = await served()
    error = error_of(await s.complete(prompt_of(5), **{field: [3, bad]}), 400)
    assert error["param"] == field
    assert s.stage.device.steps == []
    await s.check_clean()


@pytest.mark.parametrize("bad", [str(VOCAB), "-1", str(2**63), "1" * 5000, "1.5", "true", "", "x", "5 ", "\u0665", "+5"])
async def test_a_bias_for_what_is_no_id_is_refused_by_name(served: Any, bad: str) -> None:
    s = await served()
    error = error_of(await s.complete(prompt_of(5), logit_bias={"3": 1.0, bad: 1.0}), 400)
    assert error["param"] == "logit_bias"
    assert bad[:20] in error["message"]
    await s.check_clean()


@pytest.mark.parametrize("token", [0, 1, 2, VOCAB - 1])
async def test_every_id_below_the_embedding_is_accepted_special_ones_too(served: Any, token: int) -> None:
    s = await served(block_size=4)
    prompt = [token, *prompt_of(4), token]
    answer = await s.complete(prompt, logit_bias={str(token): -1.0})
    assert answer.json()["choices"][0]["prompt_token_ids"] == prompt
    await s.check_clean()
