"""The screen of `repertory top`: panels that are made anew with each view of the company."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import ClassVar

from rich.console import RenderableType
from rich.text import Text
from textual.app import App, ComposeResult, ScreenStackError
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.css.query import NoMatches
from textual.widgets import Footer, Sparkline, Static

from ....protocol.view import CompanyView
from . import panels
from .rates import NO_RATES, rates_between

Show = Callable[[CompanyView | str], None]
"""Takes the next view, or in words why there is none."""

Source = Callable[[Show], Awaitable[None]]
"""Shows one view after another, until cancelled."""

HISTORY = 120
"""Views that the sparklines remember."""

_TRENDS = {"output": "tokens generated /s", "input": "prompt tokens computed /s"}
"""Titles of the sparklines."""


class Panel(Static):
    """A titled part of the screen."""

    DEFAULT_CSS = """
    Panel { border: round $panel-lighten-2; border-title-color: $text-muted; padding: 0 1; width: 1fr; height: 100%; }
    """

    def __init__(self, name: str, title: str) -> None:
        super().__init__(id=name)
        self.border_title = title

    def show(self, content: RenderableType) -> None:
        """Show this from now on."""
        self.update(content)


class Top(App[None]):
    """Shows what `source` sees. `q` ends it, `p` holds it still."""

    TITLE = "repertory"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #headline { height: 1; margin: 0 1; }
    #trends { height: 4; }
    .trend { width: 1fr; height: 4; margin: 0 1; }
    .trend Static { height: 1; color: $text-muted; }
    .trend Sparkline { height: 3; }
    #output Sparkline > .sparkline--max-color { color: #3fb68b; }
    #output Sparkline > .sparkline--min-color { color: #2a6b55; }
    #state { height: 9; }
    #working { height: 2fr; min-height: 8; }
    #sharing { height: 1fr; min-height: 8; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "Quit"), Binding("p", "hold", "Hold still / go on")]

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self._last: CompanyView | None = None
        self._is_held = False
        self._generated: deque[float] = deque(maxlen=HISTORY)
        self._prompts: deque[float] = deque(maxlen=HISTORY)

    def compose(self) -> ComposeResult:
        """The panels, from top to bottom."""
        yield Static("looking for the core ...", id="headline")
        with Horizontal(id="trends"):
            for name, title in _TRENDS.items():
                with VerticalScroll(id=name, classes="trend"):
                    yield Static(title)
                    yield Sparkline([], summary_function=max)
        with Horizontal(id="state"):
            yield Panel("queues", "requests")
            yield Panel("memory", "KV cache")
        with Horizontal(id="working"):
            yield Panel("actors", "actors")
            yield Panel("slowest", "slowest requests now")
        with Horizontal(id="sharing"):
            yield Panel("prefixes", "largest shared prefixes")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self.run_worker(self._source(self.show), exclusive=True)

    def action_hold(self) -> None:
        """Hold the picture still, or go on."""
        self._is_held = not self._is_held
        self.sub_title = "held" if self._is_held else ""
        if self._is_held:
            self.query_one("#headline", Static).update(Text(" held still: p goes on ", style="reverse"))

    def show(self, seen: CompanyView | str) -> None:
        """The next view, or why there is none."""
        if self._is_held:
            return
        with contextlib.suppress(NoMatches, ScreenStackError):  # the screen is being taken down while the source still looks
            self._draw(seen)

    def _draw(self, seen: CompanyView | str) -> None:
        headline = self.query_one("#headline", Static)
        if isinstance(seen, str):
            self._last = None
            headline.update(Text(f" {seen} ", style=f"reverse {panels.HOT}"))
            return
        rates = rates_between(self._last, seen)
        if rates is not NO_RATES:
            self._trace("output", self._generated, rates.generated_tokens)
            self._trace("input", self._prompts, rates.prompt_tokens)
        self._last = seen
        headline.update(panels.headline(seen, rates))
        contents: dict[str, RenderableType] = {
            "queues": panels.queues(seen),
            "memory": panels.memory(seen, rates),
            "actors": panels.actors(seen, rates),
            "slowest": panels.slowest(seen),
            "prefixes": panels.prefixes(seen),
        }
        for name, content in contents.items():
            self.query_one(f"#{name}", Panel).show(content)

    def _trace(self, name: str, values: deque[float], value: float) -> None:
        values.append(value)
        self.query_one(f"#{name} Sparkline", Sparkline).data = list(values)
        self.query_one(f"#{name} Static", Static).update(f"{_TRENDS[name]}   now {value:,.0f}   most {max(values):,.0f}")
