"""When to plan the next step while one runs: as late as it can be.

A step planned early cannot take in what arrives meanwhile, and computes one token too many for each
sequence that ends unforeseen. A step planned late leaves the device idle. So step n + 1 is planned
when the predicted end of step n is nearer than twice the time that planning and sending take, plus
what predictions are usually wrong by, plus how late an event loop's timers are.
"""

from __future__ import annotations

from collections import deque

from .step_time import Load, StepTimeModel

PLAN_FACTOR = 2.0
ERROR_FACTOR = 3.0
PLAN_WEIGHT = 0.1
TIMER_S = 0.0015
"""The loop's selector rounds waits up to whole milliseconds."""


class Pacer:
    """Loads of the steps in flight, when the first of them began, and the model that says when it will end."""

    def __init__(self) -> None:
        self.model = StepTimeModel()
        self.plan_s = 0.001
        """Running mean of how long planning and sending a step take; the shell measures it."""
        self._loads: deque[Load] = deque()
        self._began_s = 0.0

    def on_planned(self, seconds: float) -> None:
        """Planning and sending a step took `seconds`."""
        self.plan_s += PLAN_WEIGHT * (seconds - self.plan_s)

    def on_sent(self, load: Load, now: float) -> None:
        """A step is on its way; it begins when those before it have ended."""
        if not self._loads:
            self._began_s = now
        self._loads.append(load)

    def on_done(self, seconds: float, now: float) -> None:
        """The first step in flight has ended after `seconds` on the device."""
        load = self._loads.popleft()
        if load.num_rows:
            self.model.learn(load, seconds)
        self._began_s = now

    def plan_at(self) -> float | None:
        """When the next step is to be planned; None: now."""
        if not self._loads:
            return None
        predicted_s = self.model.predict(self._loads[0])
        if predicted_s is None:
            return None
        lead_s = PLAN_FACTOR * self.plan_s + ERROR_FACTOR * self.model.error_s + TIMER_S
        return self._began_s + predicted_s - lead_s

    def reset(self) -> None:
        """The device is gone, and with it every step in flight. What it did still tells how fast it is."""
        self._loads.clear()
