"""What keeps the streams apart: each forgotten wait must show on streams that run late."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from repertory.gpu.cuda import executor as executor_module
from repertory.gpu.cuda.fences import EventFences
from repertory.gpu.cuda.staging import Staging
from repertory.gpu.timelines import FencesClosedError
from repertory.protocol.ids import SequenceId
from repertory.protocol.messages import Fences, NewRow
from repertory.tests.gpu.stepping import GREEDY
from repertory.tests.gpu.threads import begin, until
from repertory.tests.gpu_cuda.lazy_runtime import LazyRuntime
from repertory.tests.gpu_cuda.opened import open_late
from repertory.tests.gpu_cuda.test_executor import Ahead, copy_of

PROMPT = random.Random(3).choices(range(3, 320), k=30)
OTHER = random.Random(4).choices(range(3, 320), k=30)


def swapped(model_dir: Path, seed: int) -> list[int]:
    """A sequence leaves for the host while its step runs, another takes its blocks, and it comes back into others."""
    executor, runtime = open_late(model_dir, seed=seed, num_device_blocks=40)
    runtime.copies_may_end.clear()
    ahead = Ahead(executor, params={})
    ahead.add(1, PROMPT, room=2)
    table = list(ahead.admitted[0].block_table)
    ahead.launch({1: 30})
    on_host = list(range(len(table)))
    out = begin(lambda: executor.copy_blocks(copy_of("out", table, on_host, 1, Fences(1))))
    until(lambda: executor._fences._launched.completed.copy_out == 1)
    ahead.released.append(SequenceId(1))
    ahead.admitted.append(NewRow(SequenceId(2), OTHER, len(OTHER), GREEDY, table))
    ahead.computed[2], ahead.length[2], ahead.tokens[2] = 0, len(OTHER), []
    ahead.launch({2: 30}, after=Fences(1, 1))
    back = ahead.free[: len(table)]
    inwards = begin(lambda: executor.copy_blocks(copy_of("in", on_host, back, 1, Fences(2, 1))))
    until(lambda: executor._fences._launched.completed.copy_in == 1)
    ahead.answer()
    ahead.admitted.append(NewRow(SequenceId(1), PROMPT + ahead.tokens[1], 30, GREEDY, back))
    ahead.launch({1: 1}, after=Fences(2, 1, 1))
    while ahead.pending:
        ahead.answer()
    runtime.copies_may_end.set()
    assert out.result(60).ok and inwards.result(60).ok
    return ahead.tokens[1]


@pytest.fixture(scope="module")
def stayed(tiny_model: Path) -> list[int]:
    ahead = Ahead(open_late(tiny_model)[0], params={})
    ahead.add(1, PROMPT)
    return ahead.run(2)[1]


@pytest.mark.parametrize("seed", range(6))
def test_a_swap_beside_steps_changes_nothing(tiny_model: Path, stayed: list[int], seed: int) -> None:
    assert swapped(tiny_model, seed) == stayed


def _hold_nothing_back(streams: str) -> Callable[[pytest.MonkeyPatch], None]:
    def forget(patch: pytest.MonkeyPatch) -> None:
        really = EventFences.hold_back

        def hold_back(self: EventFences, stream: Any, after: Fences) -> None:
            really(self, stream, Fences() if stream.name == streams else after)

        patch.setattr(EventFences, "hold_back", hold_back)

    return forget


def _one_buffer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Staging, "arrays", lambda self, turn: self._arrays[0])
    patch.setattr(Staging, "copy_over", lambda self, turn: self._device.copy_(self._hosts[0]))


@pytest.mark.parametrize("slip", [_hold_nothing_back(name) for name in ("compute", "copy_out", "copy_in")])
def test_a_fence_that_is_forgotten_changes_tokens(
    tiny_model: Path, stayed: list[int], monkeypatch: pytest.MonkeyPatch, slip: Callable[[pytest.MonkeyPatch], None]
) -> None:
    slip(monkeypatch)
    assert any(_goes_wrong(lambda seed=seed: swapped(tiny_model, seed) != stayed) for seed in range(12))


def _goes_wrong(differs: Callable[[], bool]) -> bool:
    try:
        return differs()
    except Exception:
        return True


def test_staging_that_is_written_while_it_may_be_read_changes_tokens(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(seed: int) -> dict[int, list[int]]:
        ahead = Ahead(open_late(tiny_model, seed=seed)[0], params={})
        ahead.add(1, PROMPT)
        ahead.add(2, OTHER[:7])
        return ahead.run(6, chunk=9)

    expected = run(0)
    _one_buffer(monkeypatch)
    assert any(_goes_wrong(lambda seed=seed: run(seed) != expected) for seed in range(12))


def test_a_step_whose_tokens_are_taken_for_known_goes_wrong(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Ahead(open_late(tiny_model)[0], params={})
    expected.add(1, PROMPT)
    tokens = expected.run(4)[1]
    monkeypatch.setattr(executor_module, "UNKNOWN", 5)
    ahead = Ahead(open_late(tiny_model)[0], params={})
    ahead.add(1, PROMPT)
    assert ahead.run(4)[1] != tokens


# ---- the fences by themselves ------------------------------------------------------------------


def waits_of(runtime: LazyRuntime) -> list[tuple[str, str]]:
    return [entry[1:] for entry in runtime.history if entry[0] == "wait"]


def test_what_is_over_or_never_was_is_not_waited_for() -> None:
    runtime, fences = LazyRuntime(), EventFences()
    fences.hold_back(runtime.compute, Fences())
    fences.launched("copy_in", 1, runtime.copy_in.record())
    fences.over("copy_in", 1)
    fences.hold_back(runtime.compute, Fences(copy_in=1))
    assert waits_of(runtime) == []


def test_an_operation_that_could_not_be_launched_stands_for_those_before_it() -> None:
    runtime, fences = LazyRuntime(), EventFences()
    fences.launched("copy_out", 1, runtime.copy_out.record())
    fences.launched("copy_out", 2, None)
    fences.hold_back(runtime.compute, Fences(copy_out=2))
    assert waits_of(runtime) == [("compute", "copy_out")]
    fences.over("copy_out", 2)
    fences.hold_back(runtime.copy_in, Fences(copy_out=2))
    assert waits_of(runtime) == [("compute", "copy_out")]


def test_a_later_operation_does_not_stand_for_an_earlier_one() -> None:
    runtime, fences = LazyRuntime(), EventFences()
    first, second = runtime.copy_out.record(), runtime.copy_out.record()
    fences.launched("copy_out", 1, first)
    fences.launched("copy_out", 2, second)
    waited: list[Any] = []
    stream = type("Stream", (), {"wait": lambda self, event: waited.append(event)})()
    fences.hold_back(stream, Fences(copy_out=1))
    assert waited == [first]


def test_only_a_launch_is_waited_for_and_closing_ends_that() -> None:
    runtime, fences = LazyRuntime(), EventFences()
    held = begin(lambda: fences.hold_back(runtime.copy_out, Fences(step=3)))
    until(lambda: fences.num_waiting == 1)
    fences.launched("step", 2, runtime.compute.record())
    assert not held.done()
    fences.launched("step", 3, runtime.compute.record())
    held.result(60)
    assert waits_of(runtime) == [("copy_out", "compute")]
    stuck = begin(lambda: fences.hold_back(runtime.copy_out, Fences(step=9)))
    until(lambda: fences.num_waiting == 1)
    fences.close()
    assert isinstance(stuck.exception(60), FencesClosedError)


def test_the_lanes_wait_on_their_own_threads_and_the_compute_thread_never_for_them(tiny_model: Path) -> None:
    executor, runtime = open_late(tiny_model)
    ahead = Ahead(executor, params={})
    ahead.add(1, PROMPT)
    ahead.launch({1: 30})
    runtime.history.clear()
    copy = begin(lambda: executor.copy_blocks(copy_of("out", [0], [0], 1, Fences(1))))
    until(lambda: executor._fences._launched.completed.copy_out == 1)
    ahead.launch({1: 1}, after=Fences(1, 1))
    here = threading.current_thread().name
    assert [entry for entry in runtime.history if entry[0] == "synchronize" and entry[2] == here] == []
    assert copy.result(60).ok
