"""Too little KV memory, watched: who gives way, what moves to the host and back, and what every decision was between.

Decisions are the log events `scheduler.preempted` and `scheduler.host_hit` (`repertory.actors.observing.events`): a program
that configures structlog before it opens an engine gets them through a processor of its own, as here. Blocks are counted in
`Engine.stats`. A story's state follows from its events and from the tokens that its stream brings.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import structlog
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from structlog.typing import EventDict

from repertory import BlockCounts, Engine, EngineConfig, SamplingParams
from repertory.protocol.outputs import EngineStats

OPENINGS = [
    "Once upon a time, in a lighthouse at the end of the world,",
    "The old clockmaker had never seen a watch that ran backwards until",
    "A recipe for a soup that keeps you warm all winter:",
    "Dear diary, today we crossed the mountains, and",
    "The history of the bicycle begins with",
    "Deep under the sea there is a village where",
    "Seven things that every gardener should know about rain:",
    "The detective looked at the empty chair and said",
    "How a letter finds its way from one town to another:",
    "When the circus came to our street,",
    "The moon has no air, and therefore",
    "My grandmother kept bees, and from her I learned",
]

BLOCK_SIZE = 8
POOL_SHARE, HOST_SHARE = 0.3, 0.12
"""Blocks of the device's pool and of the host's, of those that all stories want at their ends. Both are too few."""
MOST_PROMPT_TOKENS = 20
"""That an opening has."""
STEPS_IN_FLIGHT = 2
BAR_WIDTH = 40
REFRESH_S, PLAIN_REFRESH_S = 0.1, 2.0
COLORS = {"referenced": "red", "cached": "yellow", "free": "green"}
LETTERS = {"referenced": "#", "cached": "+", "free": "."}
LEGEND = ", ".join(f"{letter} {kind}" for kind, letter in LETTERS.items())


@dataclass
class Story:
    """One request on the screen."""

    name: str
    opening: str
    state: str = "waiting"
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    runs_after: int = 0
    """Tokens that were known, or on their way, when it gave way: with one more it runs again."""

    def on_tokens(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Its stream has brought tokens."""
        self.token_ids, self.num_prompt_tokens = token_ids, num_prompt_tokens
        if num_prompt_tokens + len(token_ids) > self.runs_after:
            self.state = "running"

    def on_preempted(self, mode: str, num_tokens: int) -> None:
        """It gave its blocks up, with so many tokens."""
        self.state = "swapped out" if mode == "swap" else "dropped"
        self.num_preemptions += 1
        self.runs_after = num_tokens + STEPS_IN_FLIGHT


class Stage:
    """The stories, and the decisions about them as the engine's log tells them."""

    def __init__(self, num_stories: int, say: Callable[[str], None]) -> None:
        self.stories = [
            Story(f"story {number}", OPENINGS[(number - 1) % len(OPENINGS)]) for number in range(1, num_stories + 1)
        ]
        self.by_id: dict[str, Story] = {}
        """Stories by what the log calls their requests."""
        self._say = say
        self.begin()

    async def tell(self, engine: Engine, story: Story, max_tokens: int) -> None:
        """Stream one story."""
        stream = engine.generate(story.opening, params_for(max_tokens))
        self.by_id[stream.request_id] = story
        async for output in stream:
            story.on_tokens(output.outputs[0].token_ids, len(output.prompt_token_ids))
        story.state = "done"

    def begin(self) -> None:
        """Times count from here."""
        self._began = time.monotonic()

    def say(self, words: str) -> None:
        """A line with the time."""
        self._say(f"{time.monotonic() - self._began:5.1f} s  {words}")

    def on_event(self, event: EventDict) -> None:
        """A line of the log."""
        story = self.by_id.get(event.get("request_id", ""))
        if story is None:
            return
        if event["event"] == "scheduler.preempted":
            story.on_preempted(event["mode"], event["num_tokens"])
            costs = f"swap {_ms(event['swap_s'])}, recompute {_ms(event['recompute_s'])}"
            self.say(f"{story.name:<8} out:  {costs} -> {event['mode']} ({event['reason']})")
        elif event["event"] == "scheduler.host_hit":
            choice = "fetch" if event["fetched"] else "recompute"
            story.state = "fetching" if event["fetched"] else story.state
            costs = f"fetch {_ms(event['fetch_s'])}, recompute {_ms(event['recompute_s'])}"
            self.say(f"{story.name:<8} back: {costs} -> {choice}")

    def screen(self, stats: EngineStats, max_tokens: int) -> Group:
        """Everything as it stands."""
        table = Table(box=None, pad_edge=False)
        for column in ("", "state", "tokens", "gave way"):
            table.add_column(column, min_width=12)
        for story in self.stories:
            color = {"running": "green", "done": "dim", "waiting": "dim", "fetching": "cyan"}.get(story.state, "red")
            done = len(story.token_ids)
            bar = "█" * round(20 * done / max_tokens)
            table.add_row(story.name, Text(story.state, style=color), f"{bar:<20} {done}", f"{story.num_preemptions}x")
        return Group("", bar_of("device", stats.device_blocks), bar_of("host", stats.host_blocks), "", table)

    def line(self, stats: EngineStats) -> str:
        """The same in a line of text."""
        device, host = (plain_bar(counts) for counts in (stats.device_blocks, stats.host_blocks))
        queues = f"{stats.num_running} run, {stats.num_preempted} out, {stats.num_fetching} fetching, {stats.num_waiting} wait"
        return f"device [{device}] host [{host}] {queues}"


def bar_of(tier: str, counts: BlockCounts) -> Text:
    """A tier's blocks in colours."""
    text = Text(f"{tier:<7}")
    for kind, width in widths(counts, BAR_WIDTH):
        text.append("█" * width, style=COLORS[kind])
    text.append(f" {counts.total} blocks: ")
    parts = [(kind, getattr(counts, kind)) for kind in COLORS]
    for number, (kind, count) in enumerate(parts):
        text.append(f"{', ' if number else ''}{count} {kind}", style=COLORS[kind])
    return text


def plain_bar(counts: BlockCounts) -> str:
    """A tier's blocks in letters."""
    return "".join(LETTERS[kind] * width for kind, width in widths(counts, BAR_WIDTH // 4))


def widths(counts: BlockCounts, width: int) -> list[tuple[str, int]]:
    """`width` characters shared among the kinds of blocks."""
    edges, so_far = [0], 0
    for kind in COLORS:
        so_far += getattr(counts, kind)
        edges.append(round(width * so_far / max(1, counts.total)))
    return [(kind, after - before) for kind, before, after in zip(COLORS, edges, edges[1:], strict=False)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{0 if seconds > 0.1 else 1}f} ms"


def params_for(max_tokens: int) -> SamplingParams:
    """Greedy, and as long as it may be: what is compared must not depend on chance."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@contextmanager
def events_to(take: Callable[[EventDict], None]) -> Iterator[None]:
    """Everything that this process logs goes to `take`, and errors to stderr as well."""

    def hear(_logger: Any, _method: str, event: EventDict) -> EventDict:
        take(event)
        if event["level"] == "error":
            return event
        raise structlog.DropEvent

    structlog.configure(
        processors=[structlog.processors.add_log_level, hear, structlog.dev.ConsoleRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        yield
    finally:
        structlog.reset_defaults()


def config_for(num_blocks: int, num_host_blocks: int, max_model_len: int) -> EngineConfig:
    """In float32: in bfloat16 who runs beside whom may decide a tie."""
    return EngineConfig(
        model="demo",
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_device_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_model_len=max_model_len,
        max_steps_in_flight=STEPS_IN_FLIGHT,
        log_level="error",
    )


async def perform(engine: Engine, stage: Stage, max_tokens: int, console: Console) -> float:
    """Tell all stories at once and show what happens; return the seconds it took."""
    stage.begin()
    started = time.monotonic()
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stage.tell(engine, story, max_tokens)) for story in stage.stories]
        with live or nullcontext():
            while pending := [task for task in tasks if not task.done()]:
                stats = await engine.stats()
                if live is not None:
                    live.update(stage.screen(stats, max_tokens), refresh=True)
                else:
                    stage.say(stage.line(stats))
                await asyncio.wait(pending, timeout=PLAIN_REFRESH_S if live is None else REFRESH_S)
    return time.monotonic() - started


async def compare(stage: Stage, max_tokens: int, config: EngineConfig) -> tuple[list[str], float]:
    """Tell the stories again where there is room for all: names of those that differ, and the seconds it took."""
    again = Stage(len(stage.stories), print)
    async with Engine(config) as engine:
        started = time.monotonic()
        await asyncio.gather(*(again.tell(engine, story, max_tokens) for story in again.stories))
        seconds = time.monotonic() - started
    pairs = zip(stage.stories, again.stories, strict=True)
    return [one.name for one, other in pairs if one.token_ids != other.token_ids], seconds


def summary(stage: Stage, stats: EngineStats, seconds: float) -> str:
    """What it came to, in sentences."""
    by_mode = stats.num_preemptions
    known = sum(story.num_prompt_tokens + len(story.token_ids) - 1 for story in stage.stories)
    wanted = sum(-(-(story.num_prompt_tokens + len(story.token_ids)) // BLOCK_SIZE) for story in stage.stories)
    return (
        f"{len(stage.stories)} stories that came to {wanted} blocks ended in a pool of {stats.device_blocks.total}, "
        f"in {seconds:.1f} s.\n"
        f"Preemptions: {by_mode['swap']} by swap, {by_mode['recompute']} by recompute "
        f"({stats.num_swap_fallbacks} of them because the host was full).\n"
        f"Moved: {stats.swap_out_bytes / 1e6:.0f} MB to the host, {stats.swap_in_bytes / 1e6:.0f} MB back. "
        f"Computed again: {stats.num_computed_tokens + stats.prefix_cache_hits - known} of {known} tokens."
    )


def say_end(console: Console, stage: Stage, different: list[str], ample_s: float, problems: list[str]) -> None:
    """Whether all is as it should be."""
    num_tokens = sum(len(story.token_ids) for story in stage.stories)
    if different:
        console.print(f"[red]These differ:[/red] {', '.join(different)}.")
    else:
        console.print(
            f"All {len(stage.stories)} outputs are equal, {num_tokens} tokens; with room for all they took {ample_s:.1f} s."
        )
    if problems:
        console.print("[red]The audit found:[/red]", *problems)
    else:
        console.print("The audit is empty: every KV block of both tiers is accounted for.")


async def run(num_stories: int, max_tokens: int) -> int:
    """The whole demonstration; 1 if an output or the books are wrong."""
    console = Console(highlight=False)
    stage = Stage(num_stories, lambda words: console.print(words, soft_wrap=True, markup=False))
    each = -(-(MOST_PROMPT_TOKENS + max_tokens) // BLOCK_SIZE)
    pool = max(int(num_stories * each * POOL_SHARE), each + 1)
    host = int(num_stories * each * HOST_SHARE)
    length = each * BLOCK_SIZE
    console.print("[bold]repertory[/bold]: loading the demo model (SmolLM2-135M-Instruct, float32)...")
    with events_to(stage.on_event):
        async with Engine(config_for(pool, host, length)) as engine:
            console.print(
                f"{num_stories} stories of {max_tokens} tokens want about {num_stories * each} KV blocks; the pool has {pool}, "
                f"and the host's {host}. When they run out, the last story in order gives its blocks up: they are copied to "
                "the host (swap), or dropped and computed again (recompute), whichever costs everybody less.\n"
                + ("" if console.is_terminal else f"In the bars: {LEGEND}.\n")
            )
            seconds = await perform(engine, stage, max_tokens, console)
            stats = await engine.stats()
            problems = await engine.audit()
        console.print("\n" + summary(stage, stats, seconds))
        console.print("The same again with room for all, to compare...")
        different, ample_s = await compare(stage, max_tokens, config_for(num_stories * each, 0, length))
    say_end(console, stage, different, ample_s, problems)
    return 1 if different or problems else 0
