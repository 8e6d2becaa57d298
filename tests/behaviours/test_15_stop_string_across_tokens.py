"""15. A stop string ends the text wherever tokens cut it; nothing is taken back, and nothing held for no reason."""

from __future__ import annotations

import itertools
import random

import pytest

from repertory import SamplingParams
from repertory.tests.engine.stage import last_of, read_all
from repertory.tests.text.small_tokenizers import whole_pieces

PIECES = ["<a>", "<b>", "<end>", "The quick br", "own f", "ox jumps", " over", "own fox", "a", "b", "ab", "aab", "fox"]
QUICK, OWN_F, OX_JUMPS, OVER, OWN_FOX, A, B, AB, AAB, FOX = range(3, 13)
JUMPS = [QUICK, OWN_F, OX_JUMPS, OVER]
LONG = [QUICK, OWN_F, OVER, OX_JUMPS, OVER, OVER]


@pytest.fixture
def foxes(scripted):
    """An engine that answers a prompt beginning with token n with `answers[n]`."""
    return lambda answers, **settings: scripted(whole_pieces(*PIECES), answers, **settings)


def text_of(token_ids):
    return "".join(PIECES[token] for token in token_ids)


def params(stop, kind="cumulative", **more):
    limits = {"temperature": 0.0, "max_tokens": 64, **more}
    return SamplingParams(stop=stop, output_kind=kind, **limits)


@pytest.mark.parametrize(("include", "expected"), [(False, "The quick br"), (True, "The quick brown fox")])
async def test_the_text_ends_before_the_stop_string_or_with_it(foxes, include, expected):
    s = await foxes({0: JUMPS})
    for kind in ("cumulative", "final_only"):
        output = await s.ask([0], params(["own fox"], kind, include_stop_str_in_output=include))
        completion = output.outputs[0]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (expected, "stop", "own fox")
        assert completion.token_ids == JUMPS[:3], "the token that completes the match counts, none after it"
    deltas = await read_all(s.engine.generate([0], params(["own fox"], "delta", include_stop_str_in_output=include)))
    assert "".join(delta.outputs[0].text for delta in deltas) == expected
    assert [token for delta in deltas for token in delta.outputs[0].token_ids] == JUMPS[:3]
    await s.check_clean()


async def test_a_tail_that_might_become_a_stop_is_released_as_soon_as_it_cannot(foxes):
    s = await foxes({0: LONG})
    s.gate.shut()
    stream = s.engine.generate([0], params(["own fox"]))
    shown = []
    for _ in LONG:
        await s.gate.step()
        shown.append((await anext(stream)).outputs[0].text)
    s.gate.open()
    final = await last_of(stream)
    texts = [text_of(LONG[: count + 1]) for count in range(len(LONG))]
    assert shown[0] == texts[0]
    assert shown[1] == texts[0], '"own f" may become "own fox"'
    assert shown[2:] == texts[2:], "no text is held that no stop can begin with"
    assert (final.outputs[0].text, final.outputs[0].finish_reason) == (text_of(LONG), "stop")
    assert final.outputs[0].stop_reason is None, "the end token, not the stop string"
    await s.check_clean()


@pytest.mark.parametrize("max_tokens", [2, 64])
async def test_a_held_tail_is_released_at_the_end_of_the_generation(foxes, max_tokens):
    s = await foxes({0: [QUICK, OWN_F]})
    limits = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=["own fox"])
    completion = (await s.ask([0], limits)).outputs[0]
    assert completion.text == "The quick brown f"
    assert completion.finish_reason == ("length" if max_tokens == 2 else "stop")
    assert completion.stop_reason is None
    await s.check_clean()


async def test_a_stop_string_in_the_prompt_or_half_of_it_triggers_nothing(foxes):
    s = await foxes({0: [OVER, FOX], QUICK: [OX_JUMPS]})
    assert (await s.ask([0, OWN_FOX], params(["own fox"]))).outputs[0].text == " overfox"
    assert (await s.ask([QUICK, OWN_F], params(["own fox"]))).outputs[0].text == "ox jumps"
    await s.check_clean()


async def test_the_engine_stops_working_on_a_request_whose_text_has_ended(foxes):
    s = await foxes({0: [*JUMPS, *[OVER] * 1000]}, num_device_blocks=128)
    limits = SamplingParams(temperature=0.0, max_tokens=1000, stop="own fox")
    assert (await s.ask([0], limits)).outputs[0].text == "The quick br"
    assert await s.engine.audit() == []
    # Each step after the match was under way when the match was found.
    assert len(s.device.steps) < 200
    await s.check_clean()


@pytest.mark.parametrize("seed", range(4))
async def test_any_cut_of_any_text_ends_at_the_first_stop_and_takes_nothing_back(foxes, seed):
    draw = random.Random(seed)
    answers = {number: draw.choices([A, B, AB, AAB, OVER], k=14) for number in range(40)}
    s = await foxes(answers)
    for number, token_ids in answers.items():
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 3))]
        include = draw.random() < 0.5
        kind = draw.choice(["cumulative", "delta"])
        limits = params(stops, kind, include_stop_str_in_output=include, max_tokens=len(token_ids))
        outputs = await read_all(s.engine.generate([number], limits))
        whole = text_of(token_ids)
        ends = [(whole.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole]
        expected = whole
        if ends:
            end, _, stop = min(ends)
            expected = whole[: end if include else end - len(stop)]
            assert outputs[-1].outputs[0].stop_reason == stop
        pieces = [output.outputs[0].text for output in outputs]
        if kind == "cumulative":
            assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(pieces))
            assert pieces[-1] == expected
        else:
            assert "".join(pieces) == expected
    await s.check_clean()
