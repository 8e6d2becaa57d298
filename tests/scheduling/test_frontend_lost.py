"""A frontend is gone: its requests end in whatever state they are, and nobody else's notice."""

from __future__ import annotations

from repertory.protocol.ids import RequestId
from repertory.protocol.messages import Admit, FrontendLost, Resend
from repertory.protocol.sampling import SamplingParams

from .world import World

PROMPT = list(range(20, 33))
OTHERS = 5
"""Ids of the world's own frontend begin with 0."""


def submit(world: World, number: int, *, incarnation: int = OTHERS, n: int = 1) -> RequestId:
    request = RequestId(incarnation << 32 | number)
    admit = Admit(request, "theirs", [*PROMPT, 40 + number], SamplingParams(temperature=0.0, max_tokens=20, n=n), world.now)
    world.admits[request] = admit
    world.core.on_admit(admit, world.now)
    return request


def test_running_and_waiting_requests_end_and_others_go_on() -> None:
    world = World(max_num_seqs=3, blocks=64)
    mine = world.submit(PROMPT, max_tokens=10)
    theirs = [submit(world, number, n=1 + number % 2) for number in range(1, 6)]
    for _ in range(3):
        world.step()
    world.core.on_frontend_lost(FrontendLost(OTHERS), world.now)
    assert world.core.num_live == 1
    world.run()
    assert world.reason(mine) == "length"
    for request in theirs:
        assert world.ends[request].finish_reason == "abort"
    world.check_nothing_is_left()


def test_what_was_kept_to_be_said_again_goes_with_it() -> None:
    world = World()
    theirs = submit(world, 1)
    others = submit(world, 1, incarnation=OTHERS + 1)
    world.run()
    histories = world.core.telling.histories
    before = len(histories)
    world.core.on_frontend_lost(FrontendLost(OTHERS), world.now)
    assert len(histories) == before - 1
    assert histories.get(theirs) is None
    assert histories.get(others) is not None
    world.core.on_resend(Resend(theirs), world.now)
    assert world.core.take_outputs(world.now) == []


def test_a_frontend_that_nobody_knows_is_a_no_op() -> None:
    world = World()
    mine = world.submit(PROMPT)
    world.core.on_frontend_lost(FrontendLost(99), world.now)
    world.run()
    assert world.reason(mine) == "length"
