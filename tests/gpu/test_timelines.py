"""Fences on three timelines: who waits, who is woken, and what ends all waiting."""

from __future__ import annotations

import pytest

from repertory.gpu.timelines import FencesClosedError, Timelines
from repertory.protocol.messages import Fences
from repertory.tests.gpu.threads import PATIENCE_S, begin, until


def fences(step: int = 0, copy_out: int = 0, copy_in: int = 0) -> Fences:
    return Fences(step, copy_out, copy_in)  # type: ignore[arg-type]


def test_what_is_complete_is_not_waited_for() -> None:
    lines = Timelines()
    assert lines.wait(fences()) == 0.0
    lines.complete("step", 3)
    lines.complete("copy_in", 2)
    assert lines.wait(fences(step=3, copy_in=1)) == 0.0


@pytest.mark.parametrize("name", ["step", "copy_out", "copy_in"])
def test_a_waiter_goes_on_when_the_last_of_its_fences_is_complete(name: str) -> None:
    lines = Timelines()
    waiter = begin(lambda: lines.wait(fences(**{name: 2})))
    until(lambda: lines.num_waiting == 1)
    for other in ("step", "copy_out", "copy_in"):
        lines.complete(other, 1 if other == name else 9)  # type: ignore[arg-type]
    assert lines.num_waiting == 1
    assert lines.unmet(fences(2, 2, 2)) == [name]
    lines.complete(name, 2)  # type: ignore[arg-type]
    assert waiter.result(PATIENCE_S) > 0
    assert lines.num_waiting == 0


def test_all_three_are_waited_for() -> None:
    lines = Timelines()
    waiter = begin(lambda: lines.wait(fences(1, 1, 1)))
    for name in ("copy_in", "step"):
        lines.complete(name, 1)  # type: ignore[arg-type]
    until(lambda: lines.num_waiting == 1)
    lines.complete("copy_out", 1)
    assert waiter.result(PATIENCE_S) > 0


def test_everything_before_a_complete_operation_is_complete_and_stays_so() -> None:
    lines = Timelines()
    lines.complete("copy_out", 5)
    lines.complete("copy_out", 4)
    assert lines.completed == fences(copy_out=5)
    assert lines.unmet(fences(step=1, copy_out=6)) == ["step", "copy_out"]


def test_an_operation_is_complete_when_it_has_ended_and_not_before() -> None:
    lines = Timelines()
    with lines.operation("step", 1, fences()) as waited_s:
        assert waited_s == 0.0
        assert lines.completed == fences()
    assert lines.completed == fences(step=1)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_operation_that_raises_is_complete_too(error: type[BaseException]) -> None:
    lines = Timelines()
    with pytest.raises(error), lines.operation("copy_in", 1, fences()):
        raise error
    assert lines.completed == fences(copy_in=1)


def test_closing_wakes_all_who_wait_and_lets_nobody_wait_any_more() -> None:
    lines = Timelines()
    waiters = [begin(lambda number=number: lines.wait(fences(step=number))) for number in (1, 2, 3)]  # type: ignore[misc]
    until(lambda: lines.num_waiting == 3)
    lines.complete("step", 1)
    lines.close()
    lines.close()
    assert waiters[0].result(PATIENCE_S) > 0
    for waiter in waiters[1:]:
        assert isinstance(waiter.exception(PATIENCE_S), FencesClosedError)
    with pytest.raises(FencesClosedError):
        lines.wait(fences(copy_out=1))
    assert lines.wait(fences(step=1)) == 0.0
    assert lines.num_waiting == 0
