"""A dozen chats at once, sharing the KV of their common system prompt; what happens when KV memory runs out; a server that
loses its device.

usage: scripts/demo [--max-tokens N]
       scripts/demo pressure [--stories N] [--max-tokens N]
       scripts/demo serve [--max-tokens N]

All load the demo model (SmolLM2-135M-Instruct, from a PyPI package). The first asks it twelve questions at the
same moment, shows the answers as they stream in side by side, and then what each request cost:
how soon its first token came, and how much of its prompt it found computed already. The second is `demos/pressure.py`, the
third `demos/serve.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from demos import pressure, serve
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from repertory import Engine, EngineError, RequestOutput, SamplingParams
from repertory.protocol.outputs import EngineStats

SYSTEM_PROMPT = """You are the help desk of a small public library. You answer in one or two short sentences, in plain words.
The library is open from Monday to Friday between nine in the morning and seven in the evening, on Saturdays until two, and
it is closed on Sundays and public holidays. A reader's card is free for everybody who lives in the town and costs ten euros
a year for everybody else. Up to twelve books may be borrowed for four weeks; each may be renewed twice unless another
reader has asked for it. Newspapers and reference books stay in the reading room. Films and games may be borrowed for one
week. A book that comes back late costs twenty cents a day, up to five euros. Lost books are replaced at their price. The
reading room has thirty desks, six computers and a quiet corner for children. Coffee may be taken into the garden, but not
to the shelves. On the first Thursday of each month there is a reading for children, on the last Friday one for grown-ups.
Groups and school classes are welcome by appointment. If you do not know an answer, say so, and name the desk on the ground
floor. Never invent opening hours, prices or names. General questions about books, writers, countries, numbers and words
are welcome too, and are answered as briefly and as truthfully as those about the library itself."""

QUESTIONS = [
    "What is the capital of France?",
    "When are you open on Saturdays?",
    "Who wrote Hamlet?",
    "How many books may I borrow?",
    "Name three primary colours.",
    "What does a reader's card cost?",
    "How many days are there in a week?",
    "May I bring coffee into the garden?",
    "Which planet is closest to the sun?",
    "Can I borrow newspapers?",
    "What is the opposite of hot?",
    "What do I pay for a late book?",
]


@dataclass
class Chat:
    """One question on the screen."""

    question: str
    text: str = ""
    started: float = field(default_factory=time.monotonic)
    ttft_s: float | None = None
    last: RequestOutput | None = None

    def take(self, output: RequestOutput) -> None:
        """New text has come."""
        if self.ttft_s is None:
            self.ttft_s = time.monotonic() - self.started
        self.last = output
        self.text = output.outputs[0].text

    def panel(self) -> Panel:
        """The chat as it stands."""
        is_done = self.last is not None and self.last.finished
        body = Text(self.text.strip() or "...", style="" if self.text else "dim")
        return Panel(body, title=self.question, title_align="left", border_style="green" if is_done else "cyan", height=7)


async def ask(engine: Engine, chat: Chat, max_tokens: int) -> None:
    """Stream one answer into `chat`."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": chat.question}]
    chat.started = time.monotonic()
    async for output in engine.generate(messages, SamplingParams(max_tokens=max_tokens, temperature=0.0)):
        chat.take(output)


def screen(chats: list[Chat], console: Console) -> Columns:
    """All chats side by side."""
    width = max(36, console.width // 3 - 2)
    return Columns([chat.panel() for chat in chats], width=width, equal=True)


async def converse(engine: Engine, chats: list[Chat], max_tokens: int, console: Console) -> float:
    """Ask everything at once and show the answers as they come; return the seconds it took."""
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(engine, chat, max_tokens)) for chat in chats]
        if console.is_terminal:
            with Live(screen(chats, console), console=console, auto_refresh=False) as live:
                while not all(task.done() for task in tasks):
                    await asyncio.sleep(0.1)
                    live.update(screen(chats, console), refresh=True)
    if not console.is_terminal:
        for chat in chats:
            console.print(f"- {chat.question}\n  {' '.join(chat.text.split())}", highlight=False)
    return time.monotonic() - started


def costs(chats: list[Chat]) -> Table:
    """One row a request."""
    table = Table(title="What each request cost (in tokens)", title_justify="left")
    table.add_column("question", no_wrap=True, max_width=31)  # cut, so that the rest fits 80 columns
    for name in ("TTFT", "prompt", "cached", "output"):
        table.add_column(name, justify="right", min_width=6)
    table.add_column("end", min_width=6)
    for chat in chats:
        assert chat.last is not None
        done = chat.last.outputs[0]
        table.add_row(
            chat.question,
            f"{chat.ttft_s or 0:.2f} s",
            str(len(chat.last.prompt_token_ids)),
            str(chat.last.num_cached_tokens),
            str(len(done.token_ids)),
            done.finish_reason,
        )
    return table


def totals(chats: list[Chat], stats: EngineStats, seconds: float) -> str:
    """The sums, in sentences."""
    outputs = [chat.last for chat in chats if chat.last is not None]
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    hit_rate = stats.prefix_cache_hits / stats.prefix_cache_queries
    return (
        f"{len(outputs)} requests, {num_output} output tokens in {seconds:.1f} s ({num_output / seconds:.0f} tokens/s).\n"
        f"The prompts have {num_prompt} tokens; {stats.prefix_cache_hits} of them were in the cache "
        f"(prefix hit rate {hit_rate:.0%}).\n"
        f"Prompts and answers asked for {stats.num_computed_tokens + stats.prefix_cache_hits} tokens to be computed; "
        f"{stats.num_computed_tokens} were, in {stats.num_steps} steps."
    )


async def run(max_tokens: int) -> int:
    """The whole demonstration."""
    console = Console()
    console.print("[bold]repertory[/bold]: loading the demo model (SmolLM2-135M-Instruct)...")
    async with Engine(model="demo", log_level="warning") as engine:
        console.print(
            f"Ready on {engine.capacity.device}. Twelve readers ask a library's help desk at the same moment. "
            "Each prompt starts with the same long system prompt: the first request computes its KV, block by block, and "
            "the others take each block from the prefix tree as soon as it is there. Then all answers decode together, "
            "one token each per step.\n"
        )
        chats = [Chat(question) for question in QUESTIONS]
        seconds = await converse(engine, chats, max_tokens, console)
        stats = await engine.stats()
        problems = await engine.audit()
    console.print()
    console.print(costs(chats))
    console.print(totals(chats, stats, seconds), highlight=False)
    if problems:
        console.print("[red]The audit found:[/red]", *problems)
        return 1
    console.print("The audit is empty: every KV block and every table entry is accounted for.")
    return 0


def _at_least(least: int) -> Callable[[str], int]:
    """A kind of argument."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"at least {least}, not {text}")
        return int(text)

    return number


def parse() -> argparse.Namespace:
    """The arguments: `show` is "pressure", "serve", or None for the chats."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description="Without a name: a dozen chats at once, sharing the KV of their common system prompt."
    )
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens an answer may have (default: %(default)s)")
    words = "KV memory runs out: requests give way to others, by swap or recompute, and lose nothing by it"
    others = parser.add_subparsers(dest="show", title="other demos")
    other = others.add_parser("pressure", help=words, description=words)
    other.add_argument("--stories", type=_at_least(2), default=12, help="requests at once (default: %(default)s)")
    other.add_argument("--max-tokens", type=_at_least(8), default=80, help="tokens of each (default: %(default)s)")
    words = "a server's device process is killed while a dozen clients stream: they pause, and lose nothing"
    served = others.add_parser("serve", help=words, description=words)
    served.add_argument("--max-tokens", type=_at_least(16), default=48, help="tokens an answer has (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    """Parse the arguments and run."""
    arguments = parse()
    try:
        if arguments.show == "pressure":
            return asyncio.run(pressure.run(arguments.stories, arguments.max_tokens))
        if arguments.show == "serve":
            return asyncio.run(serve.run(QUESTIONS, arguments.max_tokens))
        return asyncio.run(run(arguments.max_tokens))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
