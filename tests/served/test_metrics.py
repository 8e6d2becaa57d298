"""What frontends learn of the whole company, themselves included, and what they cannot put into it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from repertory.actors.frontends.remote import RemoteEngine
from repertory.actors.links.codec import BadFrame, FrontendFrame, decode_from_frontend, encode
from repertory.protocol.link import Beat, ViewAnswer, ViewAsked
from repertory.protocol.metrics import MOST_ACTORS, ActorLoad
from repertory.protocol.view import MOST_PREFIXES, MOST_SLOWEST, CompanyView
from repertory.tests.engine.stage import greedy, last_of, prompt_of

from .conftest import Core

pytestmark = pytest.mark.alone

OpenCore = Callable[..., Any]


async def actors_until(engine: RemoteEngine, condition: Callable[[list[ActorLoad]], bool]) -> list[ActorLoad]:
    """What frontends say of themselves comes with their next heartbeat."""
    async with asyncio.timeout(60):
        while not condition(actors := (await engine.metrics()).actors):  # noqa: ASYNC110 - facts of another process
            await asyncio.sleep(0.02)
    return actors


async def view_of(engine: RemoteEngine) -> CompanyView:
    answer = await engine._connection()[1].ask(ViewAsked)
    assert isinstance(answer, ViewAnswer)
    return answer.view


async def test_any_frontend_tells_of_all_of_them(open_core: OpenCore) -> None:
    core: Core = await open_core()
    first, second = await core.connect(), await core.connect()
    await asyncio.gather(*(last_of(first.generate(prompt_of(6, seed), greedy(4))) for seed in range(3)))
    await last_of(second.generate(prompt_of(7), greedy(5)))

    def is_complete(actors: list[ActorLoad]) -> bool:
        return sum(load.num_messages for load in actors if load.name == "tokenizer") == 4

    actors = await actors_until(second, is_complete)
    names = [load.name for load in actors]
    assert sorted(names) == sorted(["scheduler", *2 * ["tokenizer", "detokenizer", "dispatcher", "link"]])
    assert len({load.process for load in actors}) == 3
    text = (await second.metrics_text()).decode()
    assert text == (await first.metrics_text()).decode() or "repertory_frontends" in text
    samples = {
        (sample.name, sample.labels.get("actor"), sample.labels.get("process")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["repertory_prompt_tokens_total", None, None] == 3 * 6 + 7
    assert samples["repertory_generation_tokens_total", None, None] == 3 * 4 + 5
    assert samples["repertory_frontends", None, None] == 2
    messages = {load.process: load.num_messages for load in actors if load.name == "dispatcher"}
    for process, number in messages.items():
        assert samples["repertory_actor_messages_total", "dispatcher", process] >= number > 0


async def test_a_frontend_that_has_left_is_not_told_of(open_core: OpenCore) -> None:
    core: Core = await open_core()
    stays, leaves = await core.connect(), await core.connect()
    await actors_until(stays, lambda actors: len(actors) == 9)
    await leaves.aclose()
    assert len(await actors_until(stays, lambda actors: len(actors) == 5)) == 5


async def test_a_view_of_a_crowd_is_bounded_and_names_the_oldest(open_core: OpenCore) -> None:
    core: Core = await open_core(max_num_seqs=4, num_device_blocks=512)
    engine = await core.connect()
    prefixes = [prompt_of(40, seed) for seed in range(2)]
    params = msgspec.structs.replace(greedy(1800), ignore_eos=True)  # none is over before all are there
    streams = [
        engine.generate(prefixes[number % 2] + prompt_of(5, number), params, request_id=f"{number} " + "x" * 900)
        for number in range(40)
    ]
    readers = [asyncio.ensure_future(last_of(stream)) for stream in streams]
    async with asyncio.timeout(60):
        while not (view := await view_of(engine)).prefixes or view.stats.num_running + view.stats.num_waiting < 40:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert len(view.slowest) <= MOST_SLOWEST
    assert len(view.prefixes) <= MOST_PREFIXES
    assert [int(one.label.split()[0]) for one in view.slowest] == list(range(len(view.slowest)))
    assert all(len(one.label) <= 80 for one in view.slowest)
    assert view.prefixes[0].num_tokens == 40
    assert view.prefixes[0].num_holders == 2
    assert view.prefixes[0].num_device_tokens == 40
    assert view.running_limit == 4
    for stream in streams:
        await stream.aclose()
    await asyncio.gather(*readers, return_exceptions=True)


BAD_ACTORS = [
    [{"name": "intruder"}],
    [ActorLoad("tokenizer", -1)],
    [ActorLoad("tokenizer", num_messages=-5)],
    [ActorLoad("tokenizer", handler_s=float("-inf"))],
    [ActorLoad("tokenizer")] * (MOST_ACTORS + 1),
]


@pytest.mark.parametrize("actors", BAD_ACTORS, ids=range(len(BAD_ACTORS)))
def test_actors_that_cannot_be_are_no_message(actors: Any) -> None:
    raw = msgspec.to_builtins([1, [["Beat", 5, actors]]])
    with pytest.raises(BadFrame):
        decode_from_frontend([msgspec.msgpack.encode(raw)])


def test_actors_travel_with_a_beat() -> None:
    beat = Beat(5, [ActorLoad("tokenizer", 1, 2, 3, 4.5, 6)])
    assert decode_from_frontend([encode(FrontendFrame(1, [beat]))]).messages == [beat]
