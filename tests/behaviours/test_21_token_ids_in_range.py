"""21. An id the model does not have is refused by name before anything is done with it."""

from __future__ import annotations

import pytest

from repertory import ValidationError
from repertory.tests.engine.stage import answer_of, greedy, prompt_of

VOCAB = 320
BAD = [VOCAB, VOCAB + 1, -1, 2**63, 2**400, 1.5, True, None, "5", [5]]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: repr(bad)[:24])
async def test_a_prompt_with_a_bad_id_is_refused_by_name_and_disturbs_nobody(stage, bad):
    s = await stage(block_size=4)
    s.gate.shut()
    running = s.begin(prompt_of(9), greedy(10))
    await s.gate.arrival()
    with pytest.raises(ValidationError):
        await s.ask([bad, 5, 6, 7])
    with pytest.raises(ValidationError) as caught:
        await s.ask([5, 6, 7, bad])
    assert (caught.value.field, caught.value.http_status) == ("prompt", 400)
    assert len(str(caught.value)) < 300
    if type(bad) is int and bad < 2**64:
        assert str(bad) in str(caught.value)
    stats = await s.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 0), "it never came to the scheduler"
    s.gate.open()
    assert answer_of(await running) == s.alone(prompt_of(9), greedy(10))
    assert answer_of(await s.ask(prompt_of(6, 1))) == s.alone(prompt_of(6, 1))
    await s.check_clean()


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: repr(bad)[:24])
async def test_a_stop_token_with_a_bad_id_is_refused_by_name(stage, bad):
    s = await stage()
    with pytest.raises(ValidationError, match="stop_token_ids") as caught:
        await s.ask(prompt_of(5), greedy(5, stop_token_ids=[7, bad]))
    assert caught.value.field == "stop_token_ids"
    assert (await s.engine.stats()).num_steps == 0
    await s.check_clean()


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: repr(bad)[:24])
@pytest.mark.parametrize("field", ["allowed_token_ids", "logit_bias"])
async def test_a_bad_id_in_a_parameter_is_refused_by_name(stage, field, bad):
    s = await stage()
    value = [3, bad] if field == "allowed_token_ids" else {3: 1.0, (tuple(bad) if isinstance(bad, list) else bad): 1.0}
    with pytest.raises(ValidationError, match=field) as caught:
        await s.ask(prompt_of(5), greedy(5, **{field: value}))
    assert caught.value.field == field
    assert (await s.engine.stats()).num_steps == 0
    await s.check_clean()


async def test_a_bad_word_of_ids_that_the_model_does_not_have_is_refused(stage):
    s = await stage(vocab_size=280)  # the tokenizer has more
    with pytest.raises(ValidationError) as caught:
        await s.ask(prompt_of(5), greedy(5, bad_words=["<|im_end|>"]))
    assert caught.value.field == "bad_words"
    await s.check_clean()


@pytest.mark.parametrize("token", [0, 1, 2, VOCAB - 1, VOCAB - 2])
async def test_every_id_below_the_embedding_is_accepted_special_ones_too(stage, token):
    s = await stage(block_size=4)
    prompt = [token, *prompt_of(4), token]
    output = await s.ask(prompt, greedy(5, stop_token_ids=[token]))
    assert output.prompt_token_ids == prompt
    expected = s.alone(prompt)
    if token not in expected.token_ids:
        assert answer_of(output) == expected
    await s.check_clean()


@pytest.mark.parametrize("prompt", [[], "", {}, None, 5, b"bytes", [[1, 2]], ["a"], [1, "a"], ...], ids=str)
async def test_what_is_no_prompt_is_refused(stage, prompt):
    s = await stage()
    with pytest.raises(ValidationError):
        await s.ask(prompt)
    assert answer_of(await s.ask(prompt_of(5))) == s.alone(prompt_of(5))
    await s.check_clean()
