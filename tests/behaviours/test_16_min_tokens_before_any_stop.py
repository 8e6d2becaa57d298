"""16. Below min_tokens nothing ends an answer: stop ids and ends are not chosen, stop text is text like any other."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from repertory import SamplingParams, ValidationError
from repertory.gpu.simulated.draw import HashedToken
from repertory.tests.engine.stage import EOS, LETTERS, greedy, prompt_of

NEWLINE = "\n"
EXTRA = 7
MIN, MAX = 10, 20


class Script:
    """A model that wants certain tokens at certain places of its output, else the letter of the place."""

    def __init__(self, **wanted):
        self.wanted = {int(place.removeprefix("at_")): token for place, token in wanted.items()}

    def __call__(self, tokens, slot):
        place = len(tokens) - slot.num_prompt_tokens + 1
        return self.wanted.get(place, LETTERS[30 + place])


def newline(s):
    (token,) = s.tokenizer.encode(NEWLINE, add_special_tokens=False).ids
    return token


async def staged(stage, **settings):
    """The device may choose every token, ends too."""
    return await stage(block_size=4, reserved_ids=(), **settings)


def asked(**params):
    return greedy(MAX, **{"min_tokens": MIN, "stop": [NEWLINE], "stop_token_ids": [EXTRA], **params})


@pytest.mark.parametrize("in_flight", [1, 2])
async def test_stop_text_and_ends_that_come_early_end_nothing(stage, in_flight):
    s = await staged(stage, max_steps_in_flight=in_flight)
    s.device.next_token = Script(at_2=newline(s), at_3=EOS, at_4=EXTRA)
    completion = (await s.ask(prompt_of(5), asked())).outputs[0]
    assert len(completion.token_ids) == MAX
    assert completion.finish_reason == "length"
    assert not {EOS, EXTRA} & set(completion.token_ids[:MIN])
    assert completion.text[1] == NEWLINE
    await s.check_clean()


@pytest.mark.parametrize(
    ("token", "reason", "stop_reason"), [("newline", "stop", NEWLINE), ("end", "stop", None), ("extra", "stop", EXTRA)]
)
@pytest.mark.parametrize("place", [MIN, MIN + 1, MIN + 4])
async def test_from_min_tokens_on_the_normal_rules_hold(stage, token, reason, stop_reason, place):
    s = await staged(stage)
    wanted = {"newline": newline(s), "end": EOS, "extra": EXTRA}[token]
    s.device.next_token = Script(at_2=newline(s), **{f"at_{place}": wanted})
    completion = (await s.ask(prompt_of(5), asked())).outputs[0]
    if place == MIN:  # it is one of the first ten
        assert completion.finish_reason == "length"
    else:
        assert (completion.finish_reason, completion.stop_reason) == (reason, stop_reason)
        assert len(completion.token_ids) == place
        assert completion.text.count(NEWLINE) == 1, "the early one stays, the one that ended it is cut"
    await s.check_clean()


async def test_every_end_that_the_model_declares_is_held_back(stage):
    s = await staged(stage)
    ends = (EOS, 9, 11)
    s.engine._company.resolver.eos_token_ids = ends
    s.device.next_token = Script(at_1=9, at_5=11, at_6=EOS, at_12=11)
    completion = (await s.ask(prompt_of(5), asked())).outputs[0]
    assert not set(ends) & set(completion.token_ids[:MIN])
    assert (len(completion.token_ids), completion.finish_reason) == (12, "stop")


async def test_ignore_eos_changes_only_the_end(stage):
    s = await staged(stage)
    s.device.next_token = Script(at_3=EXTRA, at_11=EOS, at_13=newline(s))
    completion = (await s.ask(prompt_of(5), asked(ignore_eos=True))).outputs[0]
    assert completion.token_ids[10] == EOS
    assert (len(completion.token_ids), completion.stop_reason) == (13, NEWLINE)
    s.device.next_token = Script(at_11=EOS, at_13=EXTRA)
    completion = (await s.ask(prompt_of(5), asked(ignore_eos=True))).outputs[0]
    assert (len(completion.token_ids), completion.stop_reason) == (13, EXTRA)


async def test_without_min_tokens_the_end_comes_when_the_model_wants_it(stage):
    s = await staged(stage)
    s.device.next_token = Script(at_3=EOS)
    completion = (await s.ask(prompt_of(5), asked(min_tokens=0))).outputs[0]
    assert len(completion.token_ids) == 3


@pytest.mark.parametrize(("least", "most"), [(11, 10), (2**31, None), (-1, 10), (1.0, 10), (True, 10)])
async def test_more_than_max_tokens_is_refused_by_name(stage, least, most):
    s = await stage()
    with pytest.raises(ValidationError, match="min_tokens") as caught:
        await s.ask(prompt_of(5), SamplingParams(min_tokens=least, max_tokens=most))
    assert caught.value.field == "min_tokens"
    assert (await s.engine.stats()).num_steps == 0
    await s.check_clean()


async def test_it_holds_through_preemptions(stage):
    s = await staged(stage, num_device_blocks=14)
    s.admit_carelessly()
    plain = HashedToken(320, reserved_ids=[newline(s)])
    s.device.next_token = lambda tokens, slot: EOS if len(tokens) % 3 else plain.draw(np.array(tokens, dtype=np.int64), slot)
    outputs = await asyncio.gather(*(s.ask(prompt_of(9, i), greedy(30, min_tokens=25)) for i in range(4)))
    assert sum((await s.engine.stats()).num_preemptions.values()) > 0
    for output in outputs:
        completion = output.outputs[0]
        assert EOS not in completion.token_ids[:25]
        assert 25 < len(completion.token_ids) <= 27 and completion.token_ids[-1] == EOS
    await s.check_clean()
