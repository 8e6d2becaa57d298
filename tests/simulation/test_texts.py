"""The simulator's detokenizer against the real one: told the same, and crashed at the same messages, both say the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from repertory.actors.detokenizer import Detokenizer
from repertory.actors.mailbox import Mailbox
from repertory.actors.simulation.drawing import VOCABULARY, draw
from repertory.actors.simulation.scenario import Scenario
from repertory.actors.simulation.world import World
from repertory.protocol.messages import Abort, Closed, Refused, Resend, TextDelta, TextOut, TokensSampled
from repertory.tests.text import small_tokenizers

TOKENIZER = small_tokenizers.whole_pieces(*(chr(ord("A") + number) for number in range(VOCABULARY)))

Told = tuple[TokensSampled | Refused, bool]
Said = tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]


class Listener(World):
    """A run that writes down what its detokenizer is told, and what it says to that."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.told: list[Told] = []
        self.said: list[Said] = []
        take = self.texts.take

        def taken() -> Any:
            deltas, replies = take()
            self.said.append((shown_deltas(deltas), shown_replies(replies)))
            return deltas, replies

        self.texts.take = taken  # type: ignore[method-assign]

    def _to_texts(self, message: TokensSampled | Refused) -> None:
        self.told.append((message, self._crashes))
        super()._to_texts(message)


def shown_deltas(deltas: list[TextDelta]) -> list[tuple[Any, ...]]:
    return sorted((d.request_id, d.index, d.token_ids, d.finish_reason or "", d.num_left) for d in deltas)


def shown_replies(replies: list[Any]) -> list[tuple[Any, ...]]:
    shown: list[tuple[Any, ...]] = []
    for reply in replies:
        match reply:
            case Abort():
                shown.append(("abort", reply.request_id, reply.reason, -1 if reply.index is None else reply.index))
            case Closed():
                shown += [("closed", request_id) for request_id in reply.request_ids]
            case Resend():
                shown.append(("resend", reply.request_id))
    return sorted(shown)


async def what_the_real_one_says(told: list[Told]) -> list[Said]:
    inbox, frontend, scheduler = (Mailbox[Any](name, 1000) for name in ("detokenizer", "frontend", "scheduler"))
    real = Detokenizer(TOKENIZER, inbox=inbox, frontend=frontend, scheduler=scheduler)
    said: list[Said] = []
    for message, crashes in told:
        if crashes:
            real._batch.append(message)
            real.core.on_tokens = real.core.on_refused = _crash  # type: ignore[method-assign,assignment]
            with pytest.raises(MemoryError):
                await real._handle(message)
            await real.recover()
        else:
            await real._handle(message)
        outs: list[TextOut] = await frontend.take(timeout_s=0) if len(frontend) else []
        said.append((shown_deltas([delta for out in outs for delta in out.deltas]), shown_replies(list(real._unsent))))
        real._unsent.clear()
    for box in (inbox, frontend, scheduler):
        box.close()
    return said


def _crash(message: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize("seed", range(25))
async def test_the_model_of_the_detokenizer_says_what_the_real_one_says(seed: int) -> None:
    scenario = draw(seed)
    without_stops = tuple(msgspec.structs.replace(visitor, text_stop=None) for visitor in scenario.visitors)
    run = Listener(scenario.kept(without_stops, scenario.faults))
    run.live()
    assert await what_the_real_one_says(run.told) == run.said
