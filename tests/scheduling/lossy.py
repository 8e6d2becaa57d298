"""A scheduler core whose device dies and whose readers are slow: `World` with the faults, and the promises, of both.

Each death is held against the rules in words: who was in an unanswered step is counted as present, a token clears the
count, whoever has been present twice runs alone, and nobody is failed but one that was alone when the device died
twice more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from repertory.actors.scheduling.sequence import SUSPECT_DEATHS, Sequence
from repertory.protocol.ids import Epoch, RequestId
from repertory.protocol.messages import CopyDone, Credit, DeviceLost, DeviceReady, RunStep, StepDone, TokensSampled

from .world import World

MOST_TURNS = 4000
LONE_DEATHS = 2
"""Deaths that a suspect must be alone at before it is failed."""


class LossyWorld(World):
    """`lose` and `restart` end and begin a life of the device; `killers` end it by being computed. Nobody is refused here."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.killers: set[RequestId] = set()
        """Requests whose steps the device does not survive."""
        self.deaths: dict[RequestId, int] = {}
        """Deaths of the device in steps of each request, since its last token."""
        self.culprits: set[RequestId] = set()
        """Requests that may be failed: the device died twice while they, already suspect, were alone in it."""
        self.found_culprits: list[bool] = []
        """What the core said at each death: whether it has found one."""
        self.num_lives = 1
        self.past_steps: list[RunStep] = []
        self.late: list[CopyDone] = []
        """Answers to copies that were in flight when the device died."""

    # ---- the device -----------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether a device takes steps."""
        return self.core.device_is_ready

    def lose(self) -> None:
        """The device dies with every step in flight. The rules are held against what becomes of those present."""
        present = {RequestId(seq_id) for step in self.in_flight for seq_id in step.seq_ids}
        alive = {request for request in present if request not in self.ends}
        for request in alive:
            self.deaths[request] = self.deaths.get(request, 0) + 1
            if self.deaths[request] == SUSPECT_DEATHS + LONE_DEATHS:
                assert present == {request}, "a culprit was not alone"
                self.culprits.add(request)
        self.in_flight.clear()
        for lane in self.copies.values():
            self.late += [CopyDone(copy.epoch, copy.copy_id, copy.direction, 1, 0.0) for copy in lane]
            lane.clear()
        self.past_steps += self.steps
        self.steps.clear()
        self.found_culprits.append(self.core.on_device_lost(DeviceLost(self.core.epoch, "the test ends it"), self.now))
        self._look()
        assert self.core.num_in_flight == 0
        assert self.core.plan(self.now) is None, "a step for a dead device"
        assert set(self.failed()) == self.culprits, "who was failed, and who should have been"
        for seq in self.alive():
            assert seq.num_deaths == self.deaths.get(seq.request_id, 0), f"deaths of request {seq.request_id}"
            assert seq.length == len(seq.log) and not seq.in_flight and not seq.holding.block_table

    def restart(self) -> None:
        """A new device, as empty as the first."""
        self.num_lives += 1
        self.device = dataclasses.replace(self.device, epoch=None)
        self._say_late()
        self.core.on_device_ready(DeviceReady(Epoch(self.num_lives)))
        self._say_late()
        self.late.clear()

    def _say_late(self) -> None:
        """Answers of a device that is gone arrive: to copies that this life knows nothing of."""
        for done in self.late:
            self.core.on_copy_done(done)
        self._look()

    def relive(self) -> None:
        """Death and return."""
        self.lose()
        self.restart()

    def plan(self) -> RunStep | None:
        """Plan a step, and see that a suspect is alone in it and nobody has more tokens than its credit."""
        step = self.core.plan(self.now)
        if step is not None:
            assert step.epoch == self.core.epoch and step.step_id == len(self.steps) + 1
            assert step.seq_ids or not self.core.num_live, "a step without rows while somebody is alive"
            self.steps.append(step)
            self.in_flight.append(step)
            self._check_rows()
        self._take_copies(step)
        is_moving = self.in_flight or any(self.copies.values())
        if step is None and not is_moving and self.is_up and not all(seq.is_held for seq in self.alive()):
            assert self.core.next_wakeup() is not None, f"nothing runs and nobody will ask again: {self.core.stats()}"
        self._look()
        return step

    def finish(self) -> None:
        """The device runs the oldest step in flight, or dies of it."""
        if self.killers & {RequestId(seq_id) for seq_id in self.in_flight[0].seq_ids}:
            self.relive()
        else:
            super().finish()

    def answer(self, done: StepDone) -> None:
        """A step's answer arrives that this world's device did not give."""
        self.core.on_step_done(done, self.now)
        self._look()

    # ---- readers --------------------------------------------------------------------------------

    def grant(self, request: RequestId, num_tokens: int) -> None:
        """Its reader takes tokens."""
        self.core.on_credit(Credit(request, num_tokens))
        self._look()

    # ---- facts ----------------------------------------------------------------------------------

    def alive(self) -> list[Sequence]:
        """Every sequence that has not ended."""
        queues = self.core.queues
        return [*queues.running, *queues.recovery, *queues.waiting, *queues.paused.values(), *queues.fetching.values()]

    def sequence(self, request: RequestId) -> Sequence | None:
        """The request's sequence while it lives, paused too."""
        return next((seq for seq in self.alive() if seq.request_id == request), None)

    def paused(self) -> list[RequestId]:
        """Paused requests, the longest first."""
        return [seq.request_id for seq in self.core.queues.paused.values()]

    def failed(self) -> list[RequestId]:
        """Requests that ended with an error."""
        return [request for request, end in self.ends.items() if end.finish_reason == "error"]

    def suspects(self) -> list[RequestId]:
        """Requests present at two deaths without a token in between."""
        return [seq.request_id for seq in self.alive() if seq.is_suspect]

    # ---- watching -------------------------------------------------------------------------------

    def _take(self, message: TokensSampled) -> None:
        for request in message.request_ids:
            self.deaths.pop(request, None)
        super()._take(message)

    def _check_rows(self) -> None:
        rows = [{RequestId(seq_id) for seq_id in step.seq_ids} for step in self.in_flight if step.seq_ids]
        together = set().union(*rows)
        if len(together) > 1 or len(rows) > 1:
            alive = together - self.ends.keys()
            crowd = [request for request in alive if self.deaths.get(request, 0) >= SUSPECT_DEATHS]
            assert not crowd, f"the suspects {crowd} do not run alone: {rows}"
        for seq in self.alive():
            assert seq.length <= seq.credit_length, f"request {seq.request_id} is planned past its credit"


def turn(world: LossyWorld) -> None:
    """Plan as far ahead as is allowed, let the device run one step, and all copies that wait for nothing."""
    while world.plan() is not None:
        pass
    if world.in_flight:
        world.finish()
    while world.copy():
        pass


def until(world: LossyWorld, condition: Callable[[], bool]) -> None:
    """Turn until `condition` holds."""
    for _ in range(MOST_TURNS):
        if condition():
            return
        turn(world)
    raise AssertionError(f"it never came: {world.core.stats()}")


def run_to_the_end(world: LossyWorld) -> None:
    """Turn until all have ended, and look at all of it."""
    until(world, lambda: not world.core.num_live)
    world.check_outputs()
    world.check_nothing_is_left()
