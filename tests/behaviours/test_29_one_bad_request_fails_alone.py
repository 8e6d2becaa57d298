"""29. A request that is wrong, or meets a fault in any stage, ends alone, and says whose fault it is."""

from __future__ import annotations

import asyncio

import pytest

from repertory import SamplingParams, ValidationError
from repertory.actors.text.decode import TextDecoder
from repertory.actors.text.prompts import PromptReader
from repertory.gpu.grammars import GrammarChecker
from repertory.gpu.structured import Grammars
from repertory.protocol.structured import StructuredOutputs
from repertory.tests.engine.stage import EOS, answer_of, greedy, last_of, prompt_of, read_all

GOOD = [(prompt_of(9, seed), greedy(12)) for seed in range(3)]


async def beside_good_ones(s, bad):
    """Run `bad()` while three good requests are in flight; return what it returned. The good ones answer as alone."""
    s.gate.shut()
    good = [s.begin(*request) for request in GOOD]
    await s.gate.arrival()
    doing = asyncio.ensure_future(bad())
    for _ in range(20):
        await asyncio.sleep(0)
    s.gate.open()
    try:
        return await doing
    finally:
        assert [answer_of(await task) for task in good] == [s.alone(*request) for request in GOOD]
        await s.check_clean()


WRONG_INPUT = [
    [{"role": "user", "content": "a"}, 5],
    [{"role": "user"}],
    [{"role": "user", "content": {}}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"content": "nobody"}],
    [{}],
    "\ud800",
    [5, "x"],
    {"role": "user"},
    b"bytes",
]


@pytest.mark.parametrize("prompt", WRONG_INPUT, ids=repr)
async def test_wrong_input_is_refused_alone(stage, prompt):
    s = await stage(block_size=4)
    with pytest.raises(ValidationError) as caught:
        await beside_good_ones(s, lambda: s.ask(prompt))
    assert caught.value.field in ("prompt", "messages")


@pytest.mark.parametrize(
    "params",
    [{"n": 10**6}, {"max_tokens": 10**12}, {"stop": ["x"] * 100_000}, {"stop": "x" * 10**6}, {"logprobs": 21},
     {"top_p": float("nan")}, {"output_kind": "all"}, {"logit_bias": dict.fromkeys(range(100_000), 1.0)}, {"seed": 2**70}],
    ids=lambda params: next(iter(params)),
)  # fmt: skip
async def test_wrong_parameters_are_refused_alone_by_name(stage, params):
    s = await stage(block_size=4)
    with pytest.raises(ValidationError) as caught:
        await beside_good_ones(s, lambda: s.ask(prompt_of(5), SamplingParams(**params)))
    assert caught.value.field == next(iter(params))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [object(), "x" * 257], ids=["of no type", "too long"])
@pytest.mark.parametrize("field", ["priority", "tenant", "cache_salt"])
async def test_a_wrong_envelope_is_refused_alone_by_name(stage, field, value):
    s = await stage(block_size=4)
    with pytest.raises(ValidationError) as caught:
        await beside_good_ones(s, lambda: s.ask(prompt_of(5), **{field: value}))
    assert caught.value.field == field


async def test_a_label_of_64_kb_is_refused_alone(stage):
    s = await stage(block_size=4)
    with pytest.raises(ValidationError, match="request_id"):
        await beside_good_ones(s, lambda: s.ask(prompt_of(5), request_id="x" * 65_536))


async def test_a_tokenizer_that_raises_fails_that_request_alone(stage, monkeypatch):
    s = await stage(block_size=4)
    read = PromptReader.read

    def read_or_raise(reader, prompt):
        if prompt == "boom":
            raise LookupError("the tokenizer has a bug")
        return read(reader, prompt)

    monkeypatch.setattr(PromptReader, "read", read_or_raise)
    output = await beside_good_ones(s, lambda: s.ask("boom"))
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.token_ids, output.finished) == ("error", [], True)
    assert "the tokenizer has a bug" in completion.stop_reason


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
async def test_a_detokenizer_that_raises_fails_that_request_alone(stage, monkeypatch, at, kind):
    s = await stage(block_size=4)
    bad = prompt_of(7, 9)
    token = s.alone(bad, greedy(20)).token_ids[at - 1]
    assert not any(token in s.alone(*request).token_ids for request in GOOD)
    step = TextDecoder.step

    def step_or_raise(decoder, token_id):
        if token_id == token:
            raise LookupError("the detokenizer has a bug")
        return step(decoder, token_id)

    monkeypatch.setattr(TextDecoder, "step", step_or_raise)
    output = await beside_good_ones(s, lambda: s.ask(bad, greedy(20, output_kind=kind)))
    completion = output.outputs[0]
    assert (completion.finish_reason, output.finished) == ("error", True)
    assert "the detokenizer has a bug" in completion.stop_reason


@pytest.mark.parametrize("step", ["first", "later"])
async def test_logits_that_are_not_finite_fail_that_request_alone(stage, step):
    s = await stage(block_size=4)
    bad = prompt_of(7, 9)
    ids = {}

    def rows_that_fail(message):
        ids.update({new.seq_id: new.num_prompt_tokens for new in message.admitted})
        starts = zip(message.seq_ids, message.starts, strict=True)
        return [seq_id for seq_id, start in starts if ids[seq_id] == len(bad) and (step == "first" or start > 9)]

    s.device.fail_rows = rows_that_fail
    outputs = await beside_good_ones(s, lambda: read_all(s.engine.generate(bad, greedy(20))))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    completion = outputs[-1].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("error", "the model's logits are not finite")
    assert completion.token_ids == s.alone(bad, greedy(20)).token_ids[: 0 if step == "first" else 4]


async def test_parameters_that_leave_no_token_fail_that_request_and_its_prompt_stays_cached(stage):
    s = await stage(block_size=4)
    prompt = prompt_of(13, 9)
    nothing = SamplingParams(temperature=0.0, allowed_token_ids=[2], min_tokens=2, max_tokens=4)  # 2 is the model's end
    completion = (await last_of(s.engine.generate(prompt, nothing))).outputs[0]
    assert (completion.finish_reason, completion.token_ids) == ("error", [])
    assert "no token is left" in completion.stop_reason
    again = await last_of(s.engine.generate(prompt, greedy(2)))
    assert again.num_cached_tokens == 12


# ---- templates, grammars, admission ----------------------------------------------------------------


async def test_a_template_that_refuses_fails_that_request_alone_in_its_own_words(stage, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% if messages[0].content == 'boom' %}{{ raise_exception('no booms here') }}{% endif %}x")
    s = await stage(block_size=4, chat_template=str(template))
    with pytest.raises(ValidationError, match="no booms here") as caught:
        await beside_good_ones(s, lambda: s.ask([{"role": "user", "content": "boom"}]))
    assert caught.value.http_status == 400


PLATE = StructuredOutputs(regex=r"[A-Z]{2}-[0-9]{3,4}")
BAD_GRAMMARS = [StructuredOutputs(json={"type": 5}), StructuredOutputs(regex="("), StructuredOutputs(grammar="start: nobody")]


@pytest.fixture
def grammars(paper_model):
    return Grammars(paper_model / "tokenizer.json", vocab_size=320, eos_token_ids=[EOS])


async def bad_grammar_beside_good_ones(s, bad):
    constrained = greedy(20, structured_outputs=PLATE)
    running = s.begin(prompt_of(9, 5), constrained)
    try:
        return await beside_good_ones(s, lambda: s.ask(prompt_of(7, 9), greedy(20, structured_outputs=bad)))
    finally:
        expected = s.device.reference(prompt_of(9, 5), constrained, 20)
        assert (await running).outputs[0].token_ids == expected[: expected.index(EOS) + 1]


@pytest.mark.parametrize("bad", BAD_GRAMMARS, ids=["schema", "expression", "grammar"])
async def test_a_grammar_at_fault_is_refused_alone(stage, grammars, bad):
    s = await stage(block_size=4, grammars=grammars)
    with pytest.raises(ValidationError, match="structured_outputs") as caught:
        await bad_grammar_beside_good_ones(s, bad)
    assert caught.value.http_status == 400


async def test_a_grammar_that_passes_and_fails_later_ends_its_request_alone(stage, grammars, monkeypatch):
    monkeypatch.setattr(GrammarChecker, "settle", lambda checker, wanted: wanted)
    s = await stage(block_size=4, grammars=grammars)
    output = await bad_grammar_beside_good_ones(s, StructuredOutputs(grammar='start: "a" <|nobody|>'))
    assert output.outputs[0].finish_reason == "error"
    assert "nobody" in output.outputs[0].stop_reason


async def test_a_policy_that_raises_on_a_request_fails_it_alone(stage, monkeypatch):
    s = await stage(block_size=4)
    policy = s.engine._company.scheduler.core.policy
    rank = policy.priority_class

    def rank_or_raise(admit):
        if admit.label == "boom":
            raise LookupError("the policy has a bug")
        return rank(admit)

    monkeypatch.setattr(policy, "priority_class", rank_or_raise)
    output = await beside_good_ones(s, lambda: s.ask(prompt_of(5), request_id="boom"))
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.token_ids, output.finished) == ("error", [], True)
    assert "the policy has a bug" in completion.stop_reason
