"""Structured outputs through a real engine: what comes out obeys, whatever happens on the way, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from repertory import Engine, EngineConfig, ValidationError
from repertory.gpu.cpu.executor import CpuExecutor
from repertory.protocol.messages import RunStep, StepDone
from repertory.protocol.structured import StructuredOutputs
from repertory.tests.sampling.structured_engine import COMPACT, RECORD, answer, answers, answers_to_all, asking

EOS = 2
PROMPT = [5, 60, 33, 7]
SCHEMA = StructuredOutputs(json=COMPACT)
PLATE = StructuredOutputs(regex=r"[A-Z]{2}-\d{3,4}")
OpenEngine = Callable[..., Any]


@pytest.fixture
async def opened(tiny_model: Path) -> AsyncIterator[OpenEngine]:
    """Opens engines on the tiny model; their books must balance at the end."""
    async with AsyncExitStack() as stack:

        async def open_engine(**settings: Any) -> Engine:
            defaults = {"num_device_blocks": 400, "block_size": 8, "kv_offloading_size": 0, "max_num_batched_tokens": 64}
            engine = await stack.enter_async_context(
                Engine(
                    model=str(tiny_model),
                    dtype="float32",
                    device="cpu",
                    worker="inline",
                    num_threads=1,
                    log_level="error",
                    **defaults | settings,
                )
            )
            stack.push_async_callback(check_books, engine)
            return engine

        yield open_engine


async def check_books(engine: Engine) -> None:
    assert await engine.audit() == []


def check_record(text: str) -> None:
    jsonschema.validate(json.loads(text), RECORD)


# ---- what comes out -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "auto"])
async def test_every_kind_of_constraint_is_obeyed_and_ends_the_answer(opened: OpenEngine, backend: str) -> None:
    engine = await opened(attention_backend=backend)
    asks = [
        asking(PROMPT, SCHEMA),
        asking(PROMPT, StructuredOutputs(json=json.dumps(RECORD)), temperature=0.0),
        asking(PROMPT, StructuredOutputs(json={"type": "array", "items": {"type": "boolean"}, "maxItems": 3})),
        asking(PROMPT, PLATE),
        asking(PROMPT, StructuredOutputs(choice=["yes", "no", 'a "third"\n\\ é😀'])),
        asking(PROMPT, StructuredOutputs(grammar='start: "<" item ">"\nitem: /[a-c]{1,4}/ | "(" item ")"')),
        asking(PROMPT, StructuredOutputs(grammar='root ::= "on" | "off" [0-9]')),
    ]
    found = [one for [one] in await answers_to_all(engine, asks)]
    assert [one.finish_reason for one in found] == ["stop"] * len(found)
    assert all(one.stop_reason in (EOS, None) and one.token_ids[-1] == EOS for one in found)
    record, plain, flags, plate, choice, nested, switch = (one.text for one in found)
    check_record(record)
    check_record(plain)
    assert all(isinstance(flag, bool) for flag in json.loads(flags))
    assert re.fullmatch(r"[A-Z]{2}-\d{3,4}", plate)
    assert choice in ("yes", "no", 'a "third"\n\\ é😀')
    assert re.fullmatch(r"<\(*[a-c]{1,4}\)*>", nested) and nested.count("(") == nested.count(")")
    assert re.fullmatch(r"on|off\d", switch)


async def test_a_json_object_is_one_however_it_is_asked_for(opened: OpenEngine) -> None:
    engine = await opened()
    wanted = StructuredOutputs(json_object=True)
    found = await answers_to_all(engine, [asking(PROMPT, wanted, seed=seed, max_tokens=1500) for seed in range(4)])
    ended = [one.text for [one] in found if one.finish_reason == "stop"]
    assert ended and all(isinstance(json.loads(text), dict) for text in ended)
    for text in (one.text for [one] in found if one.finish_reason == "length"):
        assert text.startswith("{")


async def test_siblings_have_a_grammar_each(opened: OpenEngine) -> None:
    engine = await opened()
    several = await answers(engine, asking(PROMPT, SCHEMA, n=3))
    assert [one.finish_reason for one in several] == ["stop"] * 3
    assert len({one.text for one in several}) == 3, "each draws for itself"
    for one in several:
        check_record(one.text)


async def test_stop_strings_and_max_tokens_cut_it(opened: OpenEngine) -> None:
    engine = await opened()
    stopped = await answer(engine, asking(PROMPT, SCHEMA, stop=['"kind"']))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", '"kind"')
    assert stopped.text.startswith("{") and '"kind"' not in stopped.text
    cut = await answer(engine, asking(PROMPT, SCHEMA, max_tokens=5))
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 5)


async def test_an_answer_that_can_go_on_does_so_while_ends_are_ignored_or_it_is_too_short(opened: OpenEngine) -> None:
    engine = await opened()
    word = StructuredOutputs(regex=r"([a-z]{8} )*")
    ignoring = await answer(engine, asking(PROMPT, word, ignore_eos=True, max_tokens=40))
    assert (ignoring.finish_reason, len(ignoring.token_ids)) == ("length", 40)
    short = await answer(engine, asking(PROMPT, word, min_tokens=20, max_tokens=400))
    assert len(short.token_ids) >= 20 and EOS not in short.token_ids[:-1]
    for settings in ({"ignore_eos": True}, {"min_tokens": 12}, {"min_tokens": 12, "stop_token_ids": [EOS]}):
        ended = await answer(engine, asking(PROMPT, StructuredOutputs(choice=["yes"]), max_tokens=12, **settings))
        assert (ended.text, ended.finish_reason) == ("yes", "stop"), "nothing else may follow"


# ---- on the way ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "host"), [("recompute", 0), ("swap", 300)])
async def test_preemption_does_not_lose_the_place_in_the_grammar(opened: OpenEngine, mode: str, host: int) -> None:
    asks = [asking([*PROMPT, seed], SCHEMA, seed=seed, n=1 + seed % 2, max_tokens=120) for seed in range(3, 11)]
    ample = await opened()
    alone = [await answers(ample, ask) for ask in asks]
    engine = await opened(num_device_blocks=40, num_host_blocks=host, preemption_mode=mode)
    engine._company.scheduler.core.planner.reserve.blocks = lambda growth: 0
    found = await answers_to_all(engine, asks)
    assert sum((await engine.stats()).num_preemptions.values()) > 2
    assert [[one.token_ids for one in ones] for ones in found] == [[one.token_ids for one in ones] for ones in alone]
    ended = [one.text for ones in found for one in ones if one.finish_reason == "stop"]
    assert len(ended) > 4
    for text in ended:
        check_record(text)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_neighbours_with_and_without_grammars_answer_as_alone(opened: OpenEngine, steps_in_flight: int) -> None:
    engine = await opened(max_steps_in_flight=steps_in_flight)
    asks = [
        asking(PROMPT, SCHEMA, seed=4),
        asking([9, 9, 40], max_tokens=60),
        asking(PROMPT, PLATE, seed=5),
        asking([9, 80, 40], temperature=0.0, max_tokens=60),
        asking([*PROMPT, 8], SCHEMA, temperature=0.0),
    ]
    alone = [await answer(engine, ask) for ask in asks]
    together = [one for [one] in await answers_to_all(engine, asks)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


class Mortal(CpuExecutor):
    """Fails at its thirtieth step."""

    def run_step(self, step: RunStep) -> StepDone:
        if step.step_id == 30:
            raise MemoryError("the device is gone")
        return super().run_step(step)


async def test_a_device_that_dies_goes_on_where_the_grammar_was(opened: OpenEngine) -> None:
    expected = await answer(await opened(), asking(PROMPT, SCHEMA))
    assert len(expected.token_ids) > 30
    lives: list[CpuExecutor] = []

    def open_device(config: EngineConfig, model_dir: Path) -> CpuExecutor:
        lives.append((CpuExecutor if lives else Mortal)(model_dir, config=config))
        return lives[-1]

    engine = await opened(open_device=open_device)
    assert (await answer(engine, asking(PROMPT, SCHEMA))).token_ids == expected.token_ids
    assert len(lives) == 2


# ---- one bad request ----------------------------------------------------------------------------

BOMBS = {
    "a schema that is none": StructuredOutputs(json={"type": "zebra"}),
    "a schema that is no JSON": StructuredOutputs(json='{"type":'),
    "a schema with what JSON has not": StructuredOutputs(json={"const": float("nan")}),
    "a schema nothing satisfies": StructuredOutputs(json={"allOf": [{"type": "string"}, {"type": "number"}]}),
    "a reference to nowhere": StructuredOutputs(json={"$ref": "#/$defs/none"}),
    "a regex that is none": StructuredOutputs(regex="[0-9"),
    "a grammar that is none": StructuredOutputs(grammar="start: (("),
    "a special token that the model lacks": StructuredOutputs(grammar='start: "a" <|nobody|>'),
    "GBNF that is none": StructuredOutputs(grammar="root ::= nobody"),
    "GBNF of many brackets": StructuredOutputs(grammar="root ::= " + "(" * 16_000),
    "too much GBNF": StructuredOutputs(grammar="root ::= " + '"x" ' * 10_000),
    "a regex of many brackets": StructuredOutputs(regex="(" * 8_000 + "a" + ")" * 8_000),
    "a grammar of many brackets": StructuredOutputs(grammar="start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "a deep schema": StructuredOutputs(json='{"items":' * 6_000 + "{}" + "}" * 6_000),
    "a schema that multiplies": StructuredOutputs(
        json={"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(6)]} for i in range(12)]}
    ),
    "patterns that multiply": StructuredOutputs(
        json={"allOf": [{"type": "string", "pattern": f"(.*a){{{20 + i}}}"} for i in range(12)]}
    ),
    "too many properties": StructuredOutputs(json={"type": "object", "properties": {f"p{i}": {} for i in range(4_000)}}),
}


@pytest.mark.alone
@pytest.mark.parametrize("wanted", BOMBS.values(), ids=BOMBS.keys())
async def test_a_grammar_at_fault_is_refused_in_time_and_alone(opened: OpenEngine, wanted: StructuredOutputs) -> None:
    engine = await opened()
    asks = [asking([*PROMPT, seed], SCHEMA if seed == 3 else None, seed=seed, max_tokens=40) for seed in (3, 4, 5)]
    alone = [await answer(engine, ask) for ask in asks]
    good = asyncio.ensure_future(answers_to_all(engine, asks))
    started, asked = time.thread_time(), time.perf_counter()
    with pytest.raises(ValidationError) as caught:
        await answer(engine, asking(PROMPT, wanted))
    busy, took = time.thread_time() - started, time.perf_counter() - asked
    assert busy < max(0.5, took / 3), "the loop does none of the work: what it does meanwhile is for the others"
    assert caught.value.field == "structured_outputs"
    assert len(str(caught.value)) < 1_200
    assert [one.token_ids for [one] in await good] == [one.token_ids for one in alone]


async def test_a_grammar_that_contradicts_other_parameters_fails_that_request_alone(opened: OpenEngine) -> None:
    engine = await opened()
    bad = await answer(engine, asking(PROMPT, StructuredOutputs(choice=["yes"]), allowed_token_ids=[70]))
    assert bad.finish_reason == "error" and "token" in str(bad.stop_reason)
    assert (await answer(engine, asking(PROMPT, StructuredOutputs(choice=["yes"])))).text == "yes"


async def test_an_answer_that_is_aborted_leaves_nothing(opened: OpenEngine) -> None:
    engine = await opened()
    async with engine.generate(PROMPT, None) as stream:
        await anext(stream)
    asks = [asking(PROMPT, SCHEMA, seed=seed) for seed in range(3)]
    tasks = [asyncio.ensure_future(answer(engine, ask)) for ask in asks]
    await answer(engine, asking(PROMPT, PLATE))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    check_record((await answer(engine, asking(PROMPT, SCHEMA, seed=9))).text)
