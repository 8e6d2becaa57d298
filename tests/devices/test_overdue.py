"""Overdue or not: steps and copies, each by its own time, with a clock that the test moves."""

from __future__ import annotations

import pytest

from repertory.actors.devices.overdue import Overdue, Patience
from repertory.protocol.messages import CopyBlocks, CopyDone, Fences, RunStep, StepDone

LEAST, FACTOR, UNPREDICTED = 10.0, 20.0, 600.0


@pytest.fixture
def device() -> Overdue:
    return Overdue(Patience(LEAST, FACTOR, UNPREDICTED, copies=1.0))


def step(number: int, copy_out: int = 0, copy_in: int = 0) -> RunStep:
    return RunStep(1, number, Fences(number - 1, copy_out, copy_in), [], [], [], [])  # type: ignore[arg-type]


def copy(direction: str, number: int, *after: int) -> CopyBlocks:
    return CopyBlocks(1, number, direction, Fences(*after), [], [])  # type: ignore[arg-type]


def stepped(number: int) -> StepDone:
    return StepDone(1, number, [], [], 0.0)  # type: ignore[arg-type]


def copied(direction: str, number: int) -> CopyDone:
    return CopyDone(1, number, direction, 0, 0.0)  # type: ignore[arg-type]


def test_nothing_that_was_not_sent_is_overdue(device: Overdue) -> None:
    assert device.verdict(1e9) is None


@pytest.mark.parametrize(
    ("message", "words"), [(step(1), "a step"), (copy("out", 1), "a copy out"), (copy("in", 1), "a copy in")]
)
def test_what_takes_too_long_is_overdue_by_its_prediction(device: Overdue, message: RunStep | CopyBlocks, words: str) -> None:
    device.sent(message, 2.0, now=100.0)
    assert device.verdict(100.0 + 2.0 + 40.0) is None
    assert device.verdict(142.5) == f"{words} is overdue by 40.5 s (it should have taken 2.000 s)"


def test_a_short_one_may_take_the_least_there_is(device: Overdue) -> None:
    device.sent(copy("out", 1), 0.001, now=0.0)
    assert device.verdict(10.0) is None
    assert device.verdict(10.1) is not None


def test_one_without_prediction_may_take_long(device: Overdue) -> None:
    device.sent(copy("in", 1), None, now=0.0)
    assert device.verdict(600.0) is None
    assert device.verdict(600.5) == "a copy in is overdue after 600.5 s"


def test_what_was_answered_is_not_overdue(device: Overdue) -> None:
    device.sent(step(1), 0.1, now=0.0)
    device.sent(copy("out", 1), 0.1, now=0.0)
    device.answered(stepped(1), now=5.0)
    device.answered(copied("out", 1), now=5.0)
    assert device.verdict(1e9) is None


def test_an_operation_counts_from_the_end_of_the_one_before_it(device: Overdue) -> None:
    for number in (1, 2, 3):
        device.sent(step(number), 0.1, now=0.0)
    for number in (1, 2):
        device.answered(stepped(number), now=9.0 * number)
        assert device.verdict(9.0 * number + 10.0) is None
    assert device.verdict(18.0 + 10.2) is not None


def test_one_that_is_sent_late_counts_from_then(device: Overdue) -> None:
    device.sent(step(1), 0.1, now=0.0)
    device.answered(stepped(1), now=1.0)
    device.sent(step(2), 0.1, now=100.0)
    assert device.verdict(110.0) is None
    assert device.verdict(110.2) is not None


def test_a_step_is_not_judged_while_a_copy_holds_it_up_but_the_copy_is(device: Overdue) -> None:
    device.sent(copy("in", 1), 50.0, now=0.0)
    device.sent(step(1, copy_in=1), 0.1, now=0.0)
    assert device.verdict(900.0) is None
    assert "a copy in is overdue" in str(device.verdict(1051.0))
    device.answered(copied("in", 1), now=900.0)
    assert device.verdict(910.0) is None
    assert device.verdict(910.2) == "a step is overdue by 10.1 s (it should have taken 0.100 s)"


def test_a_copy_that_failed_holds_nobody_up_any_more(device: Overdue) -> None:
    device.sent(copy("in", 1), 1.0, now=0.0)
    device.sent(step(1, copy_in=1), 0.1, now=0.0)
    device.answered(CopyDone(1, 1, "in", 0, 0.0, ok=False), now=1.0)  # type: ignore[arg-type]
    assert device.verdict(11.2) is not None


def test_a_step_that_does_not_wait_for_a_stalled_copy_is_judged_beside_it(device: Overdue) -> None:
    device.sent(copy("out", 1), None, now=0.0)
    device.sent(copy("out", 2), None, now=0.0)
    device.sent(step(1, copy_out=1), 0.1, now=0.0)
    device.answered(copied("out", 1), now=1.0)
    assert "a step is overdue" in str(device.verdict(11.2))


def test_a_copy_waits_for_the_steps_and_the_copies_that_it_names(device: Overdue) -> None:
    device.sent(step(1), 1000.0, now=0.0)
    device.sent(copy("out", 1, 1), 0.1, now=0.0)
    device.sent(copy("in", 1, 0, 1), 0.1, now=0.0)
    assert device.verdict(500.0) is None
    device.answered(stepped(1), now=500.0)
    assert device.verdict(510.0) is None
    assert "a copy out" in str(device.verdict(510.2))
    device.answered(copied("out", 1), now=505.0)
    assert device.verdict(515.0) is None
    assert "a copy in" in str(device.verdict(515.2))


def test_a_copy_behind_another_counts_when_that_and_its_fences_are_done_in_either_order(device: Overdue) -> None:
    for first, second in ((stepped(1), copied("out", 1)), (copied("out", 1), stepped(1))):
        device = Overdue(Patience(LEAST, FACTOR, UNPREDICTED, copies=1.0))
        device.sent(step(1), 100.0, now=0.0)
        device.sent(copy("out", 1), 100.0, now=0.0)
        device.sent(copy("out", 2, 1), 0.1, now=0.0)
        device.answered(first, now=50.0)
        assert device.verdict(99.0) is None
        device.answered(second, now=99.0)
        assert device.verdict(109.0) is None
        assert "a copy out" in str(device.verdict(109.2))


@pytest.mark.parametrize("message", [copy("out", 1, 5), copy("out", 1, 0, 1), copy("out", 1, 0, 0, 7), step(1, copy_in=3)])
def test_what_waits_for_something_that_was_never_sent_is_overdue_all_the_same(
    device: Overdue, message: RunStep | CopyBlocks
) -> None:
    device.sent(message, 0.1, now=0.0)
    assert device.verdict(10.2) is not None
    device.sent(copy("in", 7), 100.0, now=11.0)
    assert device.verdict(10.2) is not None


def test_answers_to_nothing_are_no_harm(device: Overdue) -> None:
    device.answered(stepped(7), now=0.0)
    device.answered(copied("in", 7), now=0.0)
    device.sent(step(8), 0.1, now=1.0)
    assert device.verdict(11.0) is None
    assert device.verdict(11.2) is not None


def test_a_copy_has_more_patience_than_a_step_since_its_lane_gives_way() -> None:
    device = Overdue(Patience(LEAST, FACTOR, UNPREDICTED))
    device.sent(copy("out", 1), 0.001, 0.0)
    assert device.verdict(5.9 * LEAST) is None
    assert device.verdict(6.1 * LEAST) is not None
