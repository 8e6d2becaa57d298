"""`repertory top` on a real core: it needs no tokenizer, disturbs nobody, and finds the next core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from repertory.actors.frontends import remote
from repertory.actors.links import watching
from repertory.actors.links.frontend_link import FrontendLink
from repertory.actors.links.watching import watch
from repertory.actors.observing.top.app import Top
from repertory.protocol.errors import EngineDeadError
from repertory.protocol.view import CompanyView
from repertory.tests.engine.stage import greedy, last_of, prompt_of

from .conftest import Core

pytestmark = pytest.mark.alone

OpenCore = Callable[..., Any]
PERIOD_S = 0.05


@asynccontextmanager
async def watched(endpoint: str) -> AsyncIterator[asyncio.Queue[CompanyView | str]]:
    """What a watcher sees, in order."""
    seen: asyncio.Queue[CompanyView | str] = asyncio.Queue()
    watcher = asyncio.ensure_future(watch(endpoint, seen.put_nowait, period_s=PERIOD_S))
    try:
        yield seen
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def seen_until(seen: asyncio.Queue[CompanyView | str], condition: Callable[[CompanyView | str], bool]) -> Any:
    async with asyncio.timeout(60):
        while not condition(found := await seen.get()):
            pass
    return found


async def test_it_sees_what_a_frontend_does(open_core: OpenCore) -> None:
    core: Core = await open_core()
    async with watched(core.endpoint) as seen:
        first = await seen_until(seen, lambda one: isinstance(one, CompanyView))
        assert (first.num_frontends, first.num_finished) == (0, 0)
        engine = await core.connect()
        await asyncio.gather(*(last_of(engine.generate(prompt_of(9, seed), greedy(4))) for seed in range(3)))
        view = await seen_until(seen, lambda one: isinstance(one, CompanyView) and one.num_finished == 3)
        assert view.num_generated_tokens == 12
        await seen_until(seen, lambda one: isinstance(one, CompanyView) and one.num_frontends == 1)
        assert await engine.audit() == []


async def test_it_reads_no_model(open_core: OpenCore, monkeypatch: pytest.MonkeyPatch) -> None:
    core: Core = await open_core()

    def fail(*_args: Any, **_options: Any) -> None:
        raise AssertionError("a model was read")

    monkeypatch.setattr(remote, "load_model_config", fail)
    monkeypatch.setattr(remote, "read_prompts_for", fail)
    async with watched(core.endpoint) as seen:
        await seen_until(seen, lambda one: isinstance(one, CompanyView))


async def test_when_the_core_dies_it_says_so_and_shows_the_next_one(
    open_core: OpenCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "GREETING_S", 0.5)  # a greeting to the one that dies is said again sooner
    core: Core = await open_core()
    async with watched(core.endpoint) as seen:
        await seen_until(seen, lambda one: isinstance(one, CompanyView))
        core.child.kill()
        reason = await seen_until(seen, lambda one: isinstance(one, str))
        assert "lost" in reason
        await asyncio.wait([core.ends[-1]])
        await core.start()
        await seen_until(seen, lambda one: isinstance(one, CompanyView))


async def test_the_screen_shows_a_real_core(open_core: OpenCore) -> None:
    core: Core = await open_core(max_num_seqs=4)
    engine = await core.connect()
    common = prompt_of(64)

    async def client(number: int) -> None:
        while True:
            await last_of(engine.generate(common + prompt_of(3, number), greedy(40), request_id=f"client-{number}"))

    clients = [asyncio.ensure_future(client(number)) for number in range(9)]
    app = Top(partial(watch, core.endpoint, period_s=PERIOD_S))
    wanted = {("queues", "4 of 4"), ("slowest", "client-"), ("prefixes", "64"), ("actors", "scheduler"), ("headline", "tok/s")}
    async with app.run_test(size=(150, 44)) as pilot:

        def shows(name: str, text: str) -> bool:
            widget = app.query_one(f"#{name}")
            return any(text in strip.text for strip in widget.render_lines(widget.size.region))

        async with asyncio.timeout(60):
            while wanted:
                await pilot.pause(PERIOD_S)
                wanted -= {(name, text) for name, text in wanted if shows(name, text)}
    for one in clients:
        one.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


@pytest.mark.usefixtures("log_lines")
async def test_where_there_is_no_core_it_keeps_looking(monkeypatch: pytest.MonkeyPatch, sockets: Path) -> None:
    monkeypatch.setattr(watching, "GREETING_S", 0.1)
    async with watched(f"ipc://{sockets}/nobody") as seen:
        async with asyncio.timeout(60):
            assert await seen.get() == f"no core answers at ipc://{sockets}/nobody"
            assert isinstance(await seen.get(), str)


@pytest.mark.usefixtures("log_lines")
@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 5, 8, 13])
async def test_whenever_it_is_cancelled_its_sockets_are_closed(num_turns: int, sockets: Path) -> None:
    made: list[FrontendLink] = []

    class Link(FrontendLink):
        def __init__(self, endpoint: str, incarnation: int) -> None:
            super().__init__(endpoint, incarnation)
            made.append(self)

        async def greet(self) -> Any:
            self._listening = asyncio.create_task(asyncio.Event().wait())  # type: ignore[assignment]
            raise EngineDeadError("it refuses")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "FrontendLink", Link)
        watcher = asyncio.ensure_future(watch(f"ipc://{sockets}/nobody", lambda seen: None))
        while not made:  # noqa: ASYNC110 - the first turn
            await asyncio.sleep(0)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    assert all(link._context.closed for link in made)
