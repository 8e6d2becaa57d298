"""A server whose device process is killed while it answers: every stream goes on from the token it had come to.

`repertory serve` runs as it does anywhere, as a command with processes of its own. The clients are OpenAI's. The device host
is found among the server's descendants and killed in the middle of the answers; the core starts another, and computes again
what the dead one knew. What each stream noticed is its longest gap between two pieces of text.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import psutil
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

DEVICE_HOST = "repertory.actors.device_host"
SYSTEM_PROMPT = "You are a friendly guide. Answer in a few plain sentences."
FRONTENDS = 2
STARTS_WITHIN_S = 120.0
ENDS_WITHIN_S = 20.0
GOODBYE_S = 2.0
KILL_AFTER_PIECES = 8
"""Of each stream: then all are in the middle."""


@dataclass
class Chat:
    """One client's stream: its text so far, and when each piece came."""

    question: str
    text: str = ""
    times: list[float] = field(default_factory=list)
    reason: str | None = None
    num_tokens: int = 0

    @property
    def longest_gap_s(self) -> float:
        """Between two of its pieces."""
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)


async def follow(client: AsyncOpenAI, chat: Chat, max_tokens: int) -> None:
    """Ask, and read the answer to its end."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": chat.question}]
    stream = await client.chat.completions.create(
        model="demo",
        messages=messages,  # type: ignore[arg-type]  # the client's own types name every role
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.usage is not None:
            chat.num_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            chat.reason = choice.finish_reason or chat.reason
            if choice.delta.content:
                chat.text += choice.delta.content
                chat.times.append(time.monotonic())


@asynccontextmanager
async def server(say: Callable[[str], None]) -> AsyncIterator[tuple[Process, str]]:
    """`repertory serve` until the end of the block: its process and its URL. Raises `RuntimeError` if it does not start."""
    command = (sys.executable, "-m", "repertory", "serve", "demo", "--served-model-name", "demo", "--port", "0")
    flags = ("--frontends", str(FRONTENDS), "--dtype", "float32", "--log-level", "error", "--log-format", "json")
    process = await asyncio.create_subprocess_exec(*command, *flags, stdout=PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(STARTS_WITHIN_S):
            line = (await process.stdout.readline()).decode().strip()
        if not line:
            raise RuntimeError("the server did not start: see what it logged")
        say(line)
        yield process, line.split()[2]
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(ENDS_WITHIN_S):
                    await process.wait()
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def descendants(pid: int) -> dict[int, str]:
    """The processes below `pid`, and their command lines."""
    found: dict[int, str] = {}
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                found[child.pid] = " ".join(child.cmdline())
    return found


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is more than an entry that its parent has yet to read."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def still_there(pids: Iterable[int]) -> list[int]:
    """Those of these processes that do not end within `GOODBYE_S`."""
    deadline = time.monotonic() + GOODBYE_S
    left = [pid for pid in pids if is_running(pid)]
    while left and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        left = [pid for pid in left if is_running(pid)]
    return left


def device_host_of(pid: int) -> int:
    """The device host's process. Raises `RuntimeError` where there is none."""
    for child, command in descendants(pid).items():
        if DEVICE_HOST in command:
            return child
    raise RuntimeError("the server has no device host")


async def kill_in_the_middle(process: Process, chats: list[Chat]) -> float:
    """Kill the device host once every stream is in the middle; returns when that was."""
    while any(len(chat.times) < KILL_AFTER_PIECES and chat.reason is None for chat in chats):  # noqa: ASYNC110 - seen from outside
        await asyncio.sleep(0.01)
    os.kill(device_host_of(process.pid), signal.SIGKILL)
    return time.monotonic()


def table_of(chats: list[Chat]) -> Table:
    """What each client saw."""
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("question", no_wrap=True, ratio=1)
    for title, width in (("tokens", 6), ("end", 6), ("longest gap", 11)):
        table.add_column(title, justify="right", no_wrap=True, min_width=width)
    table.add_column("answer", no_wrap=True, ratio=1)
    for chat in chats:
        answer = " ".join(chat.text.split())
        table.add_row(chat.question, str(chat.num_tokens), chat.reason, f"{chat.longest_gap_s:.2f} s", answer)
    return table


async def ask_all(
    url: str, questions: list[str], max_tokens: int, while_they_run: Callable[[list[Chat]], asyncio.Future[float]] | None
) -> list[Chat]:
    """Ask all questions at once and read every answer to its end."""
    chats = [Chat(question) for question in questions]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        disturbing = None if while_they_run is None else while_they_run(chats)
        await asyncio.gather(*(follow(client, chat, max_tokens) for chat in chats))
        if disturbing is not None:
            await disturbing
    return chats


async def run(questions: list[str], max_tokens: int) -> int:
    """The whole demonstration; 1 if a stream did not end as it should, or a process is left."""
    console = Console(highlight=False)
    console.print("[bold]repertory[/bold]: starting a server for the demo model (SmolLM2-135M-Instruct, float32)...")
    async with server(lambda line: console.print(line, soft_wrap=True, markup=False)) as (process, url):
        console.print(f"{len(questions)} clients stream at once, and in the middle the device process is killed...")
        disturbed = await ask_all(
            url, questions, max_tokens, lambda chats: asyncio.ensure_future(kill_in_the_middle(process, chats))
        )
        console.print(table_of(disturbed))
        console.print("The same once more, undisturbed, to compare...")
        calm = await ask_all(url, questions, max_tokens, None)
        family = descendants(process.pid)
    different = [one.question for one, other in zip(disturbed, calm, strict=True) if one.text != other.text]
    unfinished = [chat.question for chat in disturbed if chat.reason != "length" or chat.num_tokens != max_tokens]
    left = await still_there(family)
    longest_s = max(chat.longest_gap_s for chat in disturbed)
    console.print(
        f"All streams paused while a new device process loaded the model: {longest_s:.2f} s at most "
        f"(undisturbed, the longest gap was {max(chat.longest_gap_s for chat in calm):.2f} s).\n"
        f"{len(questions) - len(unfinished)} of {len(questions)} streams ended with all their {max_tokens} tokens, "
        f"{len(questions) - len(different)} with the same text as undisturbed. "
        f"Processes left behind: {len(left)}."
    )
    return 1 if different or unfinished or left else 0
