"""A mailbox keeps order and its bound, loses nothing to a cancellation, and starves nobody."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import anyio
import pytest

from repertory.actors import mailbox
from repertory.actors.mailbox import Mailbox


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_is_there_comes_at_once_and_in_order() -> None:
    box: Mailbox[int] = Mailbox("box", 3)
    assert [box.post_nowait(number) for number in range(4)] == [True, True, True, False]
    assert len(box) == 3
    assert await box.take() == [0, 1, 2]
    assert len(box) == 0


async def test_an_idle_reader_wakes_with_the_first_message() -> None:
    box: Mailbox[int] = Mailbox("box", 3)
    reader = asyncio.ensure_future(box.take())
    await turns()
    assert not reader.done()
    box.post_nowait(1)
    box.post_nowait(2)
    assert await reader == [1, 2]


async def test_nobody_comes_and_the_reader_goes_on_after_its_time() -> None:
    box: Mailbox[int] = Mailbox("box", 3)
    assert await box.take(timeout_s=0.001) == []
    assert await box.take(timeout_s=0) == []
    box.post_nowait(1)
    assert await box.take(timeout_s=0) == [1]


async def test_senders_wait_for_room_and_come_in_their_order() -> None:
    box: Mailbox[int] = Mailbox("box", 2)
    senders = [asyncio.ensure_future(box.post(number)) for number in range(7)]
    await turns()
    assert (len(box), box.num_senders) == (2, 5)
    assert not box.post_nowait(99), "nobody passes those who wait"
    assert await box.take() == [0, 1, 2, 3, 4, 5, 6]
    assert (len(box), box.num_senders) == (0, 0)
    await asyncio.gather(*senders)


async def test_a_sender_that_is_cancelled_leaves_no_message_and_the_others_are_not_held_up() -> None:
    box: Mailbox[int] = Mailbox("box", 1)
    box.post_nowait(0)
    senders = [asyncio.ensure_future(box.post(number)) for number in (1, 2, 3)]
    await turns()
    senders[0].cancel()
    await turns()
    assert await box.take() == [0, 2, 3]
    await asyncio.gather(*senders[1:])
    assert box.num_senders == len(box) == 0


async def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    box: Mailbox[int] = Mailbox("box", 3)
    for has_come in (False, True):
        reader = asyncio.ensure_future(box.take(timeout_s=5))
        await turns(2)
        if has_come:
            box.post_nowait(1)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    assert await box.take() == [1]


async def test_a_reader_that_always_finds_something_lets_others_have_a_turn() -> None:
    box: Mailbox[int] = Mailbox("box", 3)
    had_a_turn = asyncio.Event()
    asyncio.get_running_loop().call_soon(had_a_turn.set)
    for number in range(3):
        box.post_nowait(number)
        await box.take()
        if number:
            assert had_a_turn.is_set()


async def test_two_readers_are_a_fault() -> None:
    box: Mailbox[int] = Mailbox("box", 3)
    first = asyncio.ensure_future(box.take())
    await turns()
    with pytest.raises(RuntimeError, match="two tasks read the mailbox box"):
        await box.take()
    box.post_nowait(1)
    assert await first == [1]


async def test_closing_tells_whoever_waits_and_whoever_comes() -> None:
    full: Mailbox[int] = Mailbox("full", 1)
    empty: Mailbox[int] = Mailbox("empty", 1)
    full.post_nowait(1)
    waiting = [asyncio.ensure_future(full.post(2)), asyncio.ensure_future(empty.take())]
    await turns()
    full.close()
    empty.close()
    for task in waiting:
        with pytest.raises(anyio.ClosedResourceError):
            await task
    assert len(full) == full.num_senders == 0
    with pytest.raises(anyio.ClosedResourceError):
        full.post_nowait(3)
    with pytest.raises(anyio.ClosedResourceError):
        await full.take()


async def test_the_load_counts_batches_messages_and_the_time_between_taking_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr(mailbox, "time", SimpleNamespace(monotonic=lambda: clock.now))
    box: Mailbox[int] = Mailbox("box", 9)
    load = box.load
    box.post_nowait(1)
    box.post_nowait(2)
    await box.take()
    assert (load.num_turns, load.num_messages, load.handler_s) == (1, 2, 0.0)
    clock.now += 0.25  # it handles them
    reader = asyncio.ensure_future(box.take())
    await turns()
    clock.now += 60.0  # nobody writes
    box.post_nowait(3)
    await reader
    assert (load.num_turns, load.num_messages, load.handler_s) == (2, 3, 0.25)
    clock.now += 0.5
    assert await box.take(timeout_s=0.0) == []
    assert (load.num_turns, load.num_messages, load.handler_s) == (3, 3, 0.75)
