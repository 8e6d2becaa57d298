"""Steps are planned late, once, and nobody spins: what the core asks to be woken for lies ahead."""

from __future__ import annotations

import pytest

from repertory.actors.scheduling.pacing import ERROR_FACTOR, PLAN_FACTOR, TIMER_S, Pacer
from repertory.actors.scheduling.step_time import LEAST_STEPS, Load
from repertory.protocol.ids import RequestId

from .lossy import LossyWorld

LOAD = Load(0, 100, 4)
STEP_S = 0.05


def taught(pacer: Pacer) -> float:
    """Teach it that steps of LOAD take 50 ms; return when the last ended."""
    now = 1.0
    for _ in range(LEAST_STEPS):
        pacer.on_sent(LOAD, now)
        now += STEP_S
        pacer.on_done(STEP_S, now)
    return now


# ---- the pacer ------------------------------------------------------------------------------------


def test_with_nothing_in_flight_the_time_is_now() -> None:
    pacer = Pacer()
    taught(pacer)
    assert pacer.plan_at() is None


def test_before_enough_has_been_seen_the_time_is_now() -> None:
    pacer = Pacer()
    for number in range(LEAST_STEPS):
        pacer.on_sent(LOAD, float(number))
        assert pacer.plan_at() is None
        pacer.on_done(STEP_S, number + STEP_S)


def test_the_next_step_is_planned_just_before_the_predicted_end() -> None:
    pacer = Pacer()
    now = taught(pacer)
    pacer.on_sent(LOAD, now)
    plan_at = pacer.plan_at()
    assert plan_at is not None
    margin = PLAN_FACTOR * pacer.plan_s + ERROR_FACTOR * pacer.model.error_s + TIMER_S
    assert plan_at == pytest.approx(now + STEP_S - margin, abs=1e-3)
    assert now < plan_at < now + STEP_S


def test_the_margin_grows_with_the_time_that_planning_takes_and_with_the_predictions_error() -> None:
    quick, slow, wrong = Pacer(), Pacer(), Pacer()
    for pacer in (quick, slow, wrong):
        now = taught(pacer)
    for _ in range(50):
        slow.on_planned(0.01)
    wrong.on_sent(LOAD, now)
    wrong.on_done(1.5 * STEP_S, now)  # not so wrong that it is not believed
    times = []
    for pacer in (quick, slow, wrong):
        pacer.on_sent(LOAD, now)
        times.append(pacer.plan_at() or 0.0)
    assert times[1] < times[0] - 0.01
    assert wrong.model.error_s > quick.model.error_s


def test_a_step_behind_another_begins_when_that_one_has_ended() -> None:
    pacer = Pacer()
    now = taught(pacer)
    pacer.on_sent(LOAD, now)
    pacer.on_sent(LOAD, now + 0.04)
    late = now + 0.07
    pacer.on_done(0.07, late)
    plan_at = pacer.plan_at()
    assert plan_at is not None
    margin = PLAN_FACTOR * pacer.plan_s + ERROR_FACTOR * pacer.model.error_s + TIMER_S
    predicted = pacer.model.predict(LOAD)
    assert predicted is not None
    assert plan_at == pytest.approx(late + predicted - margin)


def test_after_a_reset_nothing_is_in_flight_and_what_was_learned_stays() -> None:
    pacer = Pacer()
    now = taught(pacer)
    pacer.on_sent(LOAD, now)
    pacer.on_sent(LOAD, now)
    pacer.reset()
    assert pacer.plan_at() is None
    pacer.on_sent(LOAD, now + 9.0)
    plan_at = pacer.plan_at()
    assert plan_at is not None
    assert now + 9.0 < plan_at < now + 9.0 + STEP_S


def test_a_step_without_rows_teaches_nothing() -> None:
    pacer = Pacer()
    taught(pacer)
    before = pacer.model.predict(LOAD)
    for number in range(20):
        pacer.on_sent(Load(0, 0, 0), float(number))
        pacer.on_done(0.0001, float(number))
    assert pacer.model.predict(LOAD) == before


# ---- the core -------------------------------------------------------------------------------------


def move(world: LossyWorld) -> None:
    """Plan a step, else let the device run one, else let time pass."""
    if world.plan() is None:
        if world.in_flight:
            world.finish()
        else:
            world.now += world.step_s


def paced_world(**settings: object) -> LossyWorld:
    """A world that leaves the moment to the core, taught by one request's decoding; two steps may be in flight."""
    world = LossyWorld(**{"paced": True, "step_s": STEP_S, "max_steps_in_flight": 2, **settings})
    request = world.submit([1] * 5, max_tokens=3 * LEAST_STEPS)
    while request not in world.ends:
        move(world)
    return world


def begin(world: LossyWorld, **submit: object) -> RequestId:
    """A request whose first decode is in flight."""
    request = world.submit([2] * 5, **{"max_tokens": 50, **submit})  # type: ignore[arg-type]
    while len(world.tokens.get(request, [])) < 2:
        move(world)
    while world.in_flight:
        world.finish()
    assert world.plan() is not None
    return request


def test_the_second_step_is_planned_once_and_late() -> None:
    world = paced_world()
    begin(world)
    began = world.now
    assert world.plan() is None
    wakeup = world.core.next_wakeup()
    assert wakeup is not None
    assert began < wakeup < began + STEP_S
    assert wakeup > began + STEP_S / 2
    world.now = (began + wakeup) / 2
    assert world.plan() is None
    assert world.core.next_wakeup() == wakeup
    world.now = wakeup
    assert world.plan() is not None
    assert world.plan() is None
    assert world.core.next_wakeup() is None


def test_what_arrives_while_a_step_runs_is_in_the_next_one() -> None:
    world = paced_world()
    first = begin(world)
    world.now += STEP_S / 4
    late = world.submit([9] * 3, max_tokens=2)
    assert world.plan() is None
    world.now = world.core.next_wakeup() or 0.0
    step = world.plan()
    assert step is not None
    assert set(world.rows(step)) == {first, late}


def test_an_attempt_that_finds_nothing_is_not_repeated_until_a_message_comes() -> None:
    world = paced_world()
    begin(world, max_tokens=3)  # the token in flight is its last
    world.now = world.core.next_wakeup() or 0.0
    assert world.plan() is None
    assert world.core.next_wakeup() is None
    world.submit([9] * 3, max_tokens=2)
    assert world.plan() is not None


def test_after_a_death_the_first_step_is_planned_at_once_and_the_second_late_again() -> None:
    world = paced_world()
    begin(world)
    world.lose()
    assert world.core.next_wakeup() is None
    world.restart()
    assert world.plan() is not None
    assert world.plan() is None
    wakeup = world.core.next_wakeup()
    assert wakeup is not None and wakeup > world.now


def test_a_wait_to_gather_does_not_ask_to_be_woken_before_a_step_may_be_planned() -> None:
    world = paced_world(scheduling_delay_s=0.02)
    first = begin(world)
    world.finish()
    late = world.submit([9] * 3, max_tokens=2)
    step = world.plan()  # it looks at the one that waits, and lets it wait
    assert step is not None and set(world.rows(step)) == {first}
    began = world.now
    assert world.plan() is None
    wakeup = world.core.next_wakeup()
    assert wakeup is not None and wakeup > began + 0.02, "the wait is over before a step may be planned"
    world.now = wakeup
    step = world.plan()
    assert step is not None and set(world.rows(step)) == {first, late}


def test_while_a_suspect_runs_alone_nobody_is_woken_for_a_step_that_may_not_be_planned() -> None:
    world = paced_world(scheduling_delay_s=0.02)
    suspect = world.submit([2] * 5, max_tokens=9)
    world.now += 1.0
    for _ in range(2):
        assert world.plan() is not None
        world.relive()
    assert world.plan() is not None
    assert world.suspects() == [suspect]
    world.submit([9] * 3, max_tokens=2)
    assert world.plan() is None
    assert world.core.next_wakeup() is None
    world.finish()
    assert world.plan() is not None


@pytest.mark.parametrize("seed", range(60))
def test_nobody_spins_whatever_the_settings(seed: int) -> None:
    world = LossyWorld(
        paced=True,
        step_s=[0.001, 0.05][seed % 2],
        max_steps_in_flight=1 + seed % 3 // 2,
        scheduling_delay_s=[0.0, 0.004, 0.12][seed % 3],
        scheduling_delay_factor=[0.0, 2.0][seed % 2],
        max_num_seqs=1 + seed % 4,
        credit_window=[2, 1000][seed // 2 % 2],
        max_num_batched_tokens=[3, 64][seed // 3 % 2],
    )
    for number in range(12):
        world.submit([number] * (1 + number % 7), max_tokens=1 + number * seed % 13)
    num_turns = 0
    while world.core.num_live:
        num_turns += 1
        assert num_turns < 3000, world.core.stats()
        if num_turns % 19 == seed % 19 and num_turns < 200 and not world.suspects():
            world.relive()
        while world.plan() is not None:
            pass
        wakeup = world.core.next_wakeup()
        assert wakeup is None or wakeup > world.now, f"it would spin at {world.now}: {wakeup}"
        ends = world.now + world.step_s if world.in_flight else None
        if wakeup is not None and (ends is None or wakeup < ends) and not world.paused():
            world.now = wakeup
        elif world.in_flight:
            world.finish()
        for request in world.paused():
            world.grant(request, 2)
    world.check_outputs()
