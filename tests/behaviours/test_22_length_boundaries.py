"""22. Prompt and output together have `max_model_len` tokens, to the token, and a refusal leaves nothing behind."""

from __future__ import annotations

import pytest

from repertory import NeverFitsError
from repertory.tests.engine.stage import answer_of, greedy, prompt_of


@pytest.fixture(params=[4, 16, 32], ids="blocks of {}".format)
def short_model(stage, request):
    """An engine for 16 tokens, with blocks smaller than that, as large, and larger."""
    return lambda: stage(block_size=request.param, max_model_len=16, num_device_blocks=16)


@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"),
    [(14, None, 2), (14, 1, 1), (14, 10, 2), (15, None, 1), (15, 1, 1), (15, 10, 1), (1, None, 15), (3, 100, 13)],
)
async def test_an_output_takes_what_room_there_is(short_model, length, max_tokens, expected):
    s = await short_model()
    output = await s.ask(prompt_of(length), greedy(max_tokens))
    assert answer_of(output) == s.alone(prompt_of(length), greedy(expected))
    assert output.outputs[0].finish_reason == "length"
    await s.check_clean()


@pytest.mark.parametrize("max_tokens", [None, 1, 10])
@pytest.mark.parametrize("length", [16, 17, 1000])
async def test_a_prompt_that_leaves_no_room_for_a_token_is_refused_and_the_next_served(short_model, length, max_tokens):
    s = await short_model()
    with pytest.raises(NeverFitsError, match=f"{length} tokens.*max_model_len is 16") as caught:
        await s.ask(prompt_of(length), greedy(max_tokens))
    assert (caught.value.field, caught.value.http_status) == ("prompt", 400)
    assert (await s.engine.stats()).num_steps == 0
    assert answer_of(await s.ask(prompt_of(14), greedy(None))) == s.alone(prompt_of(14), greedy(2))
    await s.check_clean()


async def test_text_counts_as_the_tokens_it_becomes(short_model):
    s = await short_model()
    output = await s.ask("0123456789ABCD", greedy(None))
    assert (len(output.prompt_token_ids), len(output.outputs[0].token_ids)) == (14, 2)
    with pytest.raises(NeverFitsError):
        await s.ask("0123456789ABCDEF", greedy(None))
    await s.check_clean()


async def test_a_chat_counts_after_its_template(stage):
    s = await stage(max_model_len=40)
    lengths = []
    for size in range(40):
        try:
            output = await s.ask([{"role": "user", "content": "7" * size}], greedy(None))
        except NeverFitsError:
            break
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 40
        lengths.append(len(output.prompt_token_ids))
    assert lengths[-1] == 39, "the longest that is served leaves room for one token"
    assert lengths[0] > 1, "the template's tokens count"
    await s.check_clean()
