"""Where a request's time went: its stages add up to the whole, and what others cost it bears their names."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest

from repertory import SamplingParams
from repertory.actors.accounts import Accounts
from repertory.actors.scheduling.journeys import MOST_EPISODES, Own, Stalls, Traveller, handed_over
from repertory.actors.scheduling.reports import Finished
from repertory.protocol.ids import RequestId, incarnation_of
from repertory.protocol.journey import MOST_LEGS, STAGES, Journey, Leg
from repertory.protocol.messages import Closed
from repertory.tests.engine.stage import Stage, greedy, last_of, prompt_of, until

A, B, C = RequestId(1), RequestId(2), RequestId(3)


def journey_of(*legs: tuple[Any, ...]) -> Journey:
    return Journey([Leg(*leg) for leg in legs])


def travel(stalls: Stalls, request_id: RequestId, arrival_s: float = 0.0) -> Traveller:
    return Traveller(request_id, arrival_s, stalls, Own())


def check(line: dict[str, Any]) -> None:
    """A canonical line adds up."""
    parts = [line.get(f"{stage}_s", 0.0) for stage in STAGES]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(line["e2e_s"], abs=1e-3)
    legs = line["legs"]
    assert legs[0][1] == 0.0
    assert legs[-1][2] == pytest.approx(line["e2e_s"], abs=1e-6)
    assert all(before[2] == after[1] for before, after in itertools.pairwise(legs)), "no gap and no overlap"
    assert all(0.0 <= stalled <= end - start + 2e-6 for _, start, end, stalled in legs)


# ---- in an engine ----------------------------------------------------------------------------------


async def leave_early(s: Stage, prompt: list[int], params: SamplingParams, num_outputs: int) -> None:
    async with s.engine.generate(prompt, params, "left") as stream:
        for _ in range(num_outputs):
            await anext(stream)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_the_parts_of_200_mixed_requests_add_up_whatever_happened_to_them(stage, log_lines, mode) -> None:
    s = await stage(
        block_size=4, num_device_blocks=40, num_host_blocks=60, preemption_mode=mode, max_num_batched_tokens=16,
        max_num_seqs=12, credit_window=8, step_seconds=lambda step: 0.0,
    )  # fmt: skip
    s.admit_carelessly()
    draw = random.Random(5)
    tasks = []
    for number in range(200):
        prompt = prompt_of(draw.randint(1, 40), draw.randrange(20))
        params = greedy(draw.randint(1, 40), n=draw.choice([1, 1, 1, 3]), stop=draw.choice([None, ["e", "7"]]))
        if number % 10 == 3:
            tasks.append(asyncio.ensure_future(leave_early(s, prompt, params, draw.randint(0, 1))))
        else:
            tasks.append(asyncio.ensure_future(last_of(s.engine.generate(prompt, params, "read"))))
        if number % 7 == 0:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    await s.check_clean()
    lines = [line for line in log_lines if line["event"] == "request.finished"]
    assert len(lines) >= 180, "all that came to the scheduler"
    for line in lines:
        check(line)
    assert sum(line["num_preemptions"] for line in lines) > 20
    assert {line["finish_reason"] for line in lines} >= {"length", "stop", "abort"}
    seen = {leg[0] for line in lines for leg in line["legs"]}
    assert seen >= {"tokenise", "queue", "blocks", "prefill", "decode", "preempted", "detokenise", "send"}
    assert mode == "recompute" or "fetch" in seen
    assert any(line.get("stalled_by") for line in lines)


async def test_a_long_prompt_is_named_by_whoever_decodes_beside_it(stage, log_lines) -> None:
    seconds = {"decode": 0.001, "chunk": 0.02}
    s = await stage(
        block_size=4, max_num_batched_tokens=16, real_time=True,
        step_seconds=lambda step: seconds["chunk"] if max(step.num_tokens, default=0) > 1 else seconds["decode"],
    )  # fmt: skip
    victim = s.engine.generate(prompt_of(1), greedy(60), "victim")
    for _ in range(5):
        await anext(victim)
    culprit = s.begin(prompt_of(100, 3), greedy(2), request_id="culprit")
    await last_of(victim)
    await culprit
    await until(lambda: sum(line["event"] == "request.finished" for line in log_lines) == 2)
    by_label = {line["label"]: line for line in log_lines if line["event"] == "request.finished"}
    check(by_label["victim"])
    named, cost_s = by_label["victim"]["stalled_by"][0]
    assert named == by_label["culprit"]["request_id"]
    assert len(by_label["victim"]["stalled_by"]) == 1
    num_chunks = by_label["culprit"]["num_chunks"]
    assert cost_s == pytest.approx(by_label["victim"]["stalled_s"], abs=1e-4)
    assert 0.5 * num_chunks * 0.02 < cost_s < 2.0 * num_chunks * 0.02
    assert "stalled_by" not in by_label["culprit"], "nobody else computed a prompt"
    assert by_label["culprit"]["prefill_s"] > 0.5 * num_chunks * 0.02


async def test_a_request_that_waits_for_memory_says_so(stage, log_lines) -> None:
    s = await stage(block_size=4, num_device_blocks=8)
    await s.ask_all([(prompt_of(20), greedy(8)), (prompt_of(20, 5), greedy(2))])
    await until(lambda: sum(line["event"] == "request.finished" for line in log_lines) == 3)
    lines = [line for line in log_lines if line["event"] == "request.finished"]
    assert [leg[0] for leg in lines[-1]["legs"]][:4] == ["tokenise", "queue", "blocks", "prefill"]


async def test_a_slow_reader_pays_for_itself(stage, log_lines) -> None:
    s = await stage(block_size=4, credit_window=4)
    stream = s.engine.generate(prompt_of(5), greedy(30), "slow")
    await until(lambda: len(s.engine._company.scheduler.core.queues.paused) == 1)
    await last_of(stream)
    await until(lambda: any(line["event"] == "request.finished" for line in log_lines))
    (line,) = [line for line in log_lines if line["event"] == "request.finished"]
    check(line)
    assert line["paused_s"] > 0


# ---- the book-keeping ------------------------------------------------------------------------------


def test_legs_follow_one_another_and_a_stage_that_takes_no_time_has_none() -> None:
    stalls = Stalls()
    stalls.at(1.0)
    one = travel(stalls, A, arrival_s=0.25)
    one.enter("blocks")
    stalls.at(1.5)
    one.enter("prefill")
    one.enter("prefill")
    stalls.at(2.0)
    one.reached_decode()
    stalls.at(4.0)
    assert one.ends() == journey_of(
        ("tokenise", 0.0, 0.75), ("blocks", 0.75, 1.25), ("prefill", 1.25, 1.75), ("decode", 1.75, 3.75)
    )


def test_the_clock_never_goes_back_and_neither_does_a_journey() -> None:
    stalls = Stalls()
    stalls.at(5.0)
    one = travel(stalls, A, arrival_s=6.0)  # another process's clock was read a moment later
    stalls.at(4.0)
    one.enter("prefill")
    stalls.at(7.0)
    assert one.ends() == journey_of(("prefill", 0.0, 2.0))


def test_after_too_many_legs_the_rest_is_one() -> None:
    stalls = Stalls()
    one = travel(stalls, A)
    for moment in range(1, 200):
        stalls.at(float(moment))
        one.enter("preempted" if moment % 2 else "prefill")
    journey = one.ends()
    assert len(journey.legs) == MOST_LEGS
    assert journey.total_s == 199.0
    assert sum(journey.seconds().values()) == pytest.approx(199.0)


def test_chunks_cost_others_their_share_and_themselves_nothing() -> None:
    stalls = Stalls()
    decodes, long, short = (travel(stalls, request) for request in (A, B, C))
    for one in (decodes, long, short):
        one.enter("prefill")
    decodes.reached_decode()
    stalls.at(1.0)
    stalls.on_step_done(0.0, 0.5, [(long.own, B, 30), (short.own, C, 10)])
    stalls.at(2.0)
    stalls.on_step_done(0.5, 0.8, [(long.own, B, 40)])  # it was sent while the other ran, and took a second
    stalls.at(3.0)
    stalls.on_step_done(2.5, 0.0, [])
    journeys = [one.ends() for one in (decodes, long, short)]
    assert [journey.seconds().get("stalled", 0.0) for journey in journeys] == pytest.approx([1.3, 0.125, 1.175])
    assert dict(journeys[0].stalled_by) == pytest.approx({B: 0.375 + 0.8, C: 0.125})
    assert dict(journeys[1].stalled_by) == pytest.approx({C: 0.125})
    assert dict(journeys[2].stalled_by) == pytest.approx({B: 1.175})


def test_a_prompt_that_one_sequence_computes_holds_none_of_its_request_up() -> None:
    stalls, own = Stalls(), Own()
    first, second = (Traveller(A, 0.0, stalls, own) for _ in range(2))
    for one in (first, second):
        one.enter("prefill")
    stalls.at(2.0)
    stalls.on_step_done(0.0, 1.0, [(own, A, 30)])
    for one in (first, second):
        one.reached_decode()
    stalls.at(3.0)
    assert [one.ends().seconds() for one in (first, second)] == [{"prefill": 2.0, "decode": 1.0}] * 2


def test_only_what_fell_into_a_leg_is_blamed_for_it() -> None:
    stalls = Stalls()
    early, late = travel(stalls, A), travel(stalls, B)
    early.enter("decode")
    for moment in range(1, 11):
        stalls.at(float(moment))
        stalls.on_step_done(moment - 1.0, 0.5, [(late.own, C, 8)])
        if moment == 4:
            early.enter("preempted")
        if moment == 7:
            early.enter("decode")
    journey = early.ends()
    assert journey.seconds() == pytest.approx({"decode": 3.5, "preempted": 3.0, "stalled": 3.5})
    assert dict(journey.stalled_by) == pytest.approx({C: 3.5})


def test_what_is_long_ago_is_forgotten_by_name_and_still_counted() -> None:
    stalls = Stalls()
    one, others = travel(stalls, A), [travel(stalls, RequestId(100 + i)) for i in range(2 * MOST_EPISODES)]
    one.enter("decode")
    for moment, other in enumerate(others, start=1):
        stalls.at(float(moment))
        stalls.on_step_done(moment - 1.0, 0.5, [(other.own, RequestId(99 + moment), 1)])
    journey = one.ends()
    assert journey.seconds()["stalled"] == pytest.approx(MOST_EPISODES)
    assert len(journey.stalled_by) == 5


@pytest.mark.parametrize(
    ("made_s", "sent_s", "expected"),
    [
        (3.0, 3.5, [("queue", 0.0, 1.0), ("decode", 1.0, 2.0, 0.5), ("detokenise", 2.0, 3.0), ("send", 3.0, 3.5)]),
        (2.0, 2.0, [("queue", 0.0, 1.0), ("decode", 1.0, 2.0, 0.5)]),
        (1.2, 1.5, [("queue", 0.0, 1.0), ("decode", 1.0, 1.2, 0.2), ("send", 1.2, 1.5)]),
        (0.5, 9.0, [("queue", 0.0, 0.5), ("send", 0.5, 9.0)]),
        (-1.0, -0.5, []),
    ],
    ids=["after", "at once", "a stop string", "before it ran", "clocks that differ"],
)
def test_a_journey_ends_when_its_last_text_was_handed_over(made_s, sent_s, expected) -> None:
    journey = journey_of(("queue", 0.0, 1.0), ("decode", 1.0, 2.0, 0.5))
    found = handed_over(journey, made_s, sent_s)
    assert [(leg.stage, leg.start_s, leg.end_s) for leg in found.legs] == [leg[:3] for leg in expected]
    assert [leg.stalled_s for leg in found.legs] == pytest.approx([leg[3] if len(leg) > 3 else 0.0 for leg in expected])


def account_of(request_id: RequestId, *legs: tuple[Any, ...]) -> Finished:
    journey = journey_of(*legs)
    return Finished(
        request_id, "label", "stop", None, None, None, None, journey.total_s, 5, 0, 7, 1, 0, arrival_s=10.0, journey=journey
    )


def test_an_account_is_written_once_when_its_last_text_is_out_or_nobody_can_say_so_any_more() -> None:
    written: list[Finished] = []
    accounts = Accounts(written.append)
    one, two, three, four = (RequestId((incarnation << 32) | 1) for incarnation in (1, 2, 3, 4))
    for request_id in (one, two, three, four):
        accounts.keep(account_of(request_id, ("queue", 0.0, 1.0), ("decode", 1.0, 2.0)))
    accounts.on_closed(Closed([one, RequestId(99)], [(12.5, 13.0), (0.0, 0.0)]), 20.0)
    accounts.on_closed(Closed([one], [(15.0, 16.0)]), 20.0)
    accounts.on_closed(Closed([two], [(1e18, 1e19)]), 20.0)
    accounts.on_frontend_lost(incarnation_of(three))
    accounts.close()
    accounts.close()
    assert [account.request_id for account in written] == [one, two, three, four]
    assert [account.e2e_s for account in written] == pytest.approx([3.0, 10.0, 2.0, 2.0])
    assert all(account.journey is not None and account.journey.total_s == account.e2e_s for account in written)
    assert len(accounts) == 0
