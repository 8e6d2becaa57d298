"""`repertory top`: what it makes of two views, the screen over a scripted source, and a real core."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType
from textual.widgets import Static

from repertory.actors.commands.top import top
from repertory.actors.observing.top import panels
from repertory.actors.observing.top.app import Panel, Show, Top
from repertory.actors.observing.top.rates import NO_RATES, rates_between
from repertory.protocol.errors import ConfigError
from repertory.protocol.ids import RequestId
from repertory.protocol.metrics import ActorLoad
from repertory.protocol.outputs import BlockCounts, EngineStats
from repertory.protocol.view import CompanyView, SharedPrefix, SlowRequest

STATS = EngineStats(
    num_running=3,
    num_waiting=20,
    num_preempted=1,
    device_blocks=BlockCounts(100, 20, 30, 50),
    host_blocks=BlockCounts(40, 10, 30, 0),
    prefix_cache_queries=1000,
    prefix_cache_hits=250,
    num_preemptions={"swap": 2, "recompute": 5},
    swap_out_bytes=2_500_000,
    swap_in_bytes=1500,
    num_steps=100,
    num_restarts=0,
)
VIEW = CompanyView(
    at_s=1000.0,
    model_name="/models/tiny/",
    device="cpu",
    block_size=16,
    running_limit=8,
    stats=STATS,
    num_prefill_tokens=4000,
    num_generated_tokens=7000,
    step_s=1.0,
    num_finished=30,
    actors=[ActorLoad("scheduler", 3, 500, 400, 2.0, 0, "core"), ActorLoad("tokenizer", 0, 9, 9, 0.1, 1, "frontend-00000007")],
    prefixes=[SharedPrefix(2048, 5, 3, 2048, 1024)],
    slowest=[SlowRequest(RequestId(2**32 + 5), "[red]my label", 75.0, "preempted", 300, 42)],
    num_frontends=1,
)


def later(view: CompanyView = VIEW, seconds: float = 2.0, **changes: Any) -> CompanyView:
    stats = msgspec.structs.replace(
        STATS, num_steps=STATS.num_steps + 50, prefix_cache_queries=1100, prefix_cache_hits=310, num_running=4
    )
    actors = [ActorLoad("scheduler", 0, 600, 500, 3.5, 0, "core"), ActorLoad("tokenizer", 1, 9, 9, 0.1, 1, "frontend-new")]
    fields = {
        "at_s": view.at_s + seconds,
        "stats": stats,
        "num_prefill_tokens": 4400,
        "num_generated_tokens": 8000,
        "step_s": 1.5,
        "num_finished": 33,
        "actors": actors,
    }
    return msgspec.structs.replace(view, **{**fields, **changes})


def text_of(content: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(content)
    return console.file.getvalue()  # type: ignore[attr-defined]


# ---- rates ---------------------------------------------------------------------------------------


def test_rates_are_what_two_views_differ_by() -> None:
    rates = rates_between(VIEW, later())
    assert rates.generated_tokens == pytest.approx(500)
    assert rates.prompt_tokens == pytest.approx(200)
    assert rates.finished == pytest.approx(1.5)
    assert rates.step_s == pytest.approx(0.01)
    assert rates.hit_rate == pytest.approx(0.6)
    assert rates.actors["scheduler", "core"] == pytest.approx((50.0, 0.75))
    assert ("tokenizer", "frontend-new") not in rates.actors, "it was not there before"


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, VIEW), (VIEW, VIEW), (later(), VIEW), (later(), later(seconds=3.0, stats=STATS))],
    ids=["the first", "the same moment", "going back", "another core"],
)
def test_without_two_views_of_one_life_there_are_no_rates(before: CompanyView | None, after: CompanyView) -> None:
    assert rates_between(before, after) is NO_RATES


def test_a_still_company_has_rates_of_zero_and_no_means() -> None:
    rates = rates_between(VIEW, msgspec.structs.replace(VIEW, at_s=1001.0))
    assert (rates.generated_tokens, rates.step_s, rates.hit_rate) == (0.0, None, None)


# ---- panels --------------------------------------------------------------------------------------


def test_panels_say_what_there_is() -> None:
    rates = rates_between(VIEW, later())
    headline = text_of(panels.headline(VIEW, rates), 200)
    assert all(part in headline for part in ("tiny", "500 tok/s out", "200 tok/s in", "10.0 ms a step", "1 frontend"))
    queues = text_of(panels.queues(VIEW), 70)
    assert all(part in queues for part in ("3 of 8", "waiting", "20", "preempted so far: 2 swapped, 5 recomputed"))
    memory = text_of(panels.memory(VIEW, rates), 70)
    assert all(part in memory for part in ("50% held", "800 held", "480 cached", "320 free", "60%", "25% since", "2.5 MB"))
    actors = text_of(panels.actors(VIEW, rates), 70)
    assert all(part in actors for part in ("scheduler", "core", "75%", "↻1", "00000007"))
    prefixes = text_of(panels.prefixes(VIEW), 100)
    assert all(part in prefixes for part in ("2,048", "5", "3 ways", "1,024 tokens on the host too"))
    slowest = text_of(panels.slowest(VIEW), 70)
    assert all(part in slowest for part in ("[red]my label", "1 min 15 s", "preempted", "300", "42"))


def test_bars_have_the_shares_of_their_parts() -> None:
    bar = panels._bar([(50, "red"), (30, "blue")], 100, width=20)
    assert bar.plain == "█" * 16 + "━" * 4
    assert panels._bar([(1, "red")], 1000, width=10).plain == "█" + "━" * 9, "what is there is seen"
    assert panels._bar([(90, "red"), (90, "blue")], 100, width=10).plain == "█" * 10
    assert panels._bar([(0, "red")], 0, width=4).plain == "━" * 4


def test_an_empty_company_can_be_shown() -> None:
    stats = msgspec.structs.replace(STATS, num_running=0, num_waiting=0, num_preempted=0, host_blocks=BlockCounts(0, 0, 0, 0))
    empty = msgspec.structs.replace(VIEW, stats=stats, actors=[], prefixes=[], slowest=[])
    assert "nothing is shared" in text_of(panels.prefixes(empty))
    assert "nobody is here" in text_of(panels.slowest(empty))
    assert "no blocks" in text_of(panels.memory(empty, NO_RATES))
    assert "running" in text_of(panels.queues(empty))


# ---- the screen ----------------------------------------------------------------------------------


class Script:
    """A source that shows what the test tells it to."""

    def __init__(self) -> None:
        self.show: Show | None = None
        self.has_begun = asyncio.Event()
        self.has_ended = False

    async def __call__(self, show: Show) -> None:
        self.show = show
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.has_ended = True


def shown(app: Top, name: str) -> str:
    """What a part of the screen shows, as text."""
    widget = app.query_one(f"#{name}", Static)
    return "\n".join(strip.text for strip in widget.render_lines(widget.size.region))


async def test_the_screen_follows_the_views() -> None:
    script = Script()
    app = Top(script)
    async with app.run_test(size=(150, 44)) as pilot:
        await script.has_begun.wait()
        assert script.show is not None
        assert "looking for the core" in shown(app, "headline")
        script.show(VIEW)
        await pilot.pause()
        assert "3 of 8" in shown(app, "queues")
        script.show(later())
        await pilot.pause()
        assert "4 of 8" in shown(app, "queues")
        assert "500 tok/s out" in shown(app, "headline")
        assert "75%" in shown(app, "actors")
        assert "2,048" in shown(app, "prefixes")
        assert "my label" in shown(app, "slowest")
        assert list(app._generated) == [pytest.approx(500.0)]
        script.show("the core is lost: its process has ended")
        await pilot.pause()
        assert "its process has ended" in shown(app, "headline")
        script.show(VIEW)
        await pilot.pause()
        assert "0 tok/s out" in shown(app, "headline"), "no rate across the loss"
        await pilot.press("q")
    assert script.has_ended


async def test_a_view_that_comes_as_the_screen_goes_is_nobodys_trouble() -> None:
    script = Script()
    app = Top(script)
    async with app.run_test(size=(150, 44)) as pilot:
        await script.has_begun.wait()
        assert script.show is not None
        script.show(VIEW)
        await pilot.pause()
        await app.query_one("#headline").remove()
        script.show(later())
    script.show(VIEW)


async def test_the_picture_can_be_held_still() -> None:
    script = Script()
    app = Top(script)
    async with app.run_test(size=(150, 44)) as pilot:
        await script.has_begun.wait()
        assert script.show is not None
        script.show(VIEW)
        await pilot.press("p")
        script.show(later())
        await pilot.pause()
        assert "3 of 8" in shown(app, "queues")
        assert "held still" in shown(app, "headline")
        await pilot.press("p")
        script.show(later())
        await pilot.pause()
        assert "4 of 8" in shown(app, "queues")


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (220, 60)])
async def test_any_size_of_terminal_will_do(size: tuple[int, int]) -> None:
    script = Script()
    app = Top(script)
    async with app.run_test(size=size) as pilot:
        await script.has_begun.wait()
        assert script.show is not None
        script.show(VIEW)
        script.show(later())
        await pilot.pause()
        assert len(app.query(Panel)) == 5
        assert "tiny" in shown(app, "headline")


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["http://x", "tcp://127.0.0.1:1", ""])
def test_an_endpoint_that_is_none_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="ipc://PATH"):
        top(endpoint)


@pytest.mark.parametrize("every_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_period_that_is_none_is_refused(every_s: float) -> None:
    with pytest.raises(ConfigError, match="every_s"):
        top("ipc:///tmp/x", every_s=every_s)


def test_without_textual_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "repertory.actors.observing.top.app", None)
    with pytest.raises(ConfigError, match=r"repertory\[top\]"):
        top("ipc:///tmp/x")
