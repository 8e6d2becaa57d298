"""What it costs to take blocks from a running request, in seconds of everyone's step time.

    swap       the exposed part of copying out what has no copy on the host, and of copying all of it back in
    recompute  the prefill that comes back with the request, less what the cache is expected to keep

Both modes compute the partial last block and the last token, so both costs contain them, and they compare as
they stand.

*Exposed* is the share of copying that somebody waits for. Copies run beside the steps, and cost nothing as long as
none waits: a step waits for a copy out whose block it is to overwrite (`StepDone.waited_s`); nothing runs at all
while every sequence that could waits for what is copied in. The first wait is laid to the lane out, the second to
the lane in. A request that waits for its blocks while others run costs them nothing. Share = seconds waited /
seconds copied, over the last few hundred steps, mixed with `PRIOR_S` of copying at `PRIOR_SHARE`: what has not been
measured for long goes back to that, else a lane that once was found bad would never be tried again.

Rates come from `calibrate` and follow `CopyDone`, as bytes by seconds of exponential averages: a large copy counts
for more than a small one, which mostly shows what it takes to start a copy. A copy that failed has cost its time, and
its blocks are computed after all: its lane's failing share of the prefill is added to the cost of a swap.

All of this is arithmetic on what it is told: no clock, no I/O, the same answers for the same facts.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal, NamedTuple

from ...protocol.config import PreemptionMode
from ...protocol.messages import CopyDirection, CopyDone
from .step_time import StepTimeModel

GUESS_RATE = 2e9
"""Bytes/s before a copy or a calibration: a thread that copies in main memory. A GPU's link has 10 to 25 times that."""
LEAST_RATE, MOST_RATE = 1e6, 1e13
"""Bounds of what is believed of a rate."""
COPY_WEIGHT = 0.1
"""Of a copy in the averages of rates, once ten have been seen; the first ones count alike."""
CALIBRATION_COPIES = 4
"""Copies that a calibration counts for."""
FAILURE_WEIGHT = 0.2
PRIOR_SHARE, PRIOR_S = 0.5, 0.01
"""The exposed share that is assumed, and for how many seconds of copying it counts."""
LEAST_SHARE = 0.05
"""Copying is never quite free: it takes memory bandwidth from the steps beside it."""
STEP_DECAY = 0.995
"""Of waits and copying times, with each step."""
SHORT_OUTPUT = 5
"""`heuristic`: an output is short while this many times it is less than the prompt (20%)."""

Outcome = Literal["swap", "recompute"]
Reason = Literal["configured", "cheaper", "short output", "long output", "host full", "nothing to swap"]


class Victim(NamedTuple):
    """A request whose blocks may be taken. What is expected is the caller's estimate."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_uncached_tokens: int
    """At its end: what has to be computed on return unless it is swapped."""
    num_tail_tokens: int
    """Of these, what has to be computed even then: past the last full block, the last token, what never was computed."""
    num_blocks_to_save: int
    """Blocks without a copy on the host: what a swap copies out."""
    num_blocks_to_fetch: int
    """Blocks that a swap is expected to copy back in."""
    num_host_blocks: int
    """Blocks on the host that it may have."""


class Decision(NamedTuple):
    """How a request gives its blocks up, both costs, and why. "host full": it would have been swapped."""

    mode: Outcome
    swap_s: float
    recompute_s: float
    reason: Reason

    @property
    def cost_s(self) -> float:
        """What was chosen costs."""
        return self.swap_s if self.mode == "swap" else self.recompute_s


class Choice(NamedTuple):
    """Whether what lies on the host is fetched, or computed again. Both costs in seconds."""

    num_tokens: int
    fetch: bool
    fetch_s: float
    recompute_s: float


class CostModel:
    """Costs of preemption and resumption. Every method but `on_*`, `calibrate` and `reset` changes nothing."""

    def __init__(self, step_time: StepTimeModel, *, block_bytes: int, block_size: int, token_budget: int) -> None:
        self.block_bytes = block_bytes
        self.block_size = block_size
        self.token_budget = token_budget
        self._step_time = step_time
        self._lanes: dict[CopyDirection, _Lane] = {"out": _Lane(), "in": _Lane()}

    # ---- what it is told ------------------------------------------------------------------------

    def calibrate(self, out_rate: float, in_rate: float) -> None:
        """The lanes were measured, in bytes/s. Replaces what was known of their speed."""
        self._lanes["out"].calibrate(out_rate)
        self._lanes["in"].calibrate(in_rate)

    def on_copy_sent(self, direction: CopyDirection, num_bytes: int) -> None:
        """A copy stands in a lane's queue."""
        self._lanes[direction].on_sent(num_bytes)

    def on_copy_done(self, done: CopyDone) -> None:
        """The first copy in a lane's queue ended."""
        self._lanes[done.direction].on_done(done)

    def on_step_waited(self, seconds: float) -> None:
        """A step ended that had waited for copies this long; 0 for most, but every step is told."""
        for lane in self._lanes.values():
            lane.on_step()
        self._lanes["out"].waited_s += seconds

    def on_fetch_waited(self, seconds: float) -> None:
        """No step ran for this long because every sequence that could run waited for blocks on their way in."""
        self._lanes["in"].waited_s += seconds

    def measure_again(self) -> None:
        """The lanes are not what they were: the next copy each way says how fast they are now."""
        for lane in self._lanes.values():
            lane.forget_rate()

    def reset(self) -> None:
        """The device is gone and its queues with it. What its lanes did still tells how fast the next one's are."""
        for lane in self._lanes.values():
            lane.forget_queue()

    # ---- what it answers ------------------------------------------------------------------------

    def rate(self, direction: CopyDirection) -> float:
        """Bytes/s of a lane."""
        return self._lanes[direction].rate

    def exposed_share(self, direction: CopyDirection) -> float:
        """Seconds of everyone's step time that a second of copying takes, `LEAST_SHARE` to 1."""
        return self._lanes[direction].exposed_share

    def queue_s(self, direction: CopyDirection) -> float:
        """Seconds until a copy sent now would begin, at most: the one that runs counts whole."""
        return self._lanes[direction].copy_s(0)

    def swap_s(self, num_bytes_to_save: int, num_bytes_to_fetch: int) -> float:
        """The exposed part of copying these out and in, each behind what its lane has to do already.

        A lane that has nothing to copy is not waited for.
        """
        return self._exposed_s("out", num_bytes_to_save) + self._exposed_s("in", num_bytes_to_fetch)

    def recompute_s(self, start: int, count: int, *, alone: bool = False) -> float:
        """Seconds of prefill of `count` tokens from position `start`, attention included.

        They ride in steps that run anyway, unless nothing else does (`alone`): then the steps, as many as the token
        budget makes of them, count whole. See `StepTimeModel.prefill_s` for what is said of prefills hardly seen.
        """
        num_steps = math.ceil(count / self.token_budget) if alone else 0
        return self._step_time.prefill_s(start, count) + num_steps * self._step_time.constant_s

    def fetch_s(self, num_bytes: int, *, alone: bool = False) -> float:
        """The exposed part of copying `num_bytes` in; all of it if nothing else can run meanwhile (`alone`)."""
        return self._lanes["in"].copy_s(num_bytes) if alone else self._exposed_s("in", num_bytes)

    def fetch_or_recompute(self, num_tokens: int, start: int, *, alone: bool = False) -> Choice:
        """The cheaper way to have tokens [start, start + num_tokens), whose blocks lie on the host, on the device.

        A fetch may fail, and then they are computed after all. Equal costs: computed, which cannot fail.
        """
        num_bytes = math.ceil(num_tokens / self.block_size) * self.block_bytes
        recompute_s = self.recompute_s(start, num_tokens, alone=alone)
        fetch_s = self.fetch_s(num_bytes, alone=alone) + self._lanes["in"].failing_share * recompute_s
        return Choice(num_tokens, fetch_s < recompute_s, fetch_s, recompute_s)

    def choose(self, mode: PreemptionMode, victim: Victim) -> Decision:
        """How `victim` would give up its blocks under this `preemption_mode`. Equal costs: it is recomputed."""
        swap_s, recompute_s = self._costs(victim)
        outcome, reason = _wanted(mode, victim, swap_s, recompute_s)
        if outcome == "swap":
            if victim.num_blocks_to_fetch == 0:
                outcome, reason = "recompute", "nothing to swap"
            elif victim.num_blocks_to_save > victim.num_host_blocks:
                outcome, reason = "recompute", "host full"
        return Decision(outcome, swap_s, recompute_s, reason)

    def _costs(self, victim: Victim) -> tuple[float, float]:
        end = victim.num_prompt_tokens + victim.num_output_tokens
        recompute_s = self.recompute_s(end - victim.num_uncached_tokens, victim.num_uncached_tokens)
        tail_s = self.recompute_s(end - victim.num_tail_tokens, victim.num_tail_tokens)
        copies_s = self.swap_s(victim.num_blocks_to_save * self.block_bytes, victim.num_blocks_to_fetch * self.block_bytes)
        arrives = 1.0
        if victim.num_blocks_to_save:
            arrives *= 1.0 - self._lanes["out"].failing_share
        if victim.num_blocks_to_fetch:
            arrives *= 1.0 - self._lanes["in"].failing_share
        return copies_s + tail_s + (1.0 - arrives) * max(0.0, recompute_s - tail_s), recompute_s

    def _exposed_s(self, direction: CopyDirection, num_bytes: int) -> float:
        lane = self._lanes[direction]
        return lane.exposed_share * lane.copy_s(num_bytes) if num_bytes else 0.0


def per_block(decision: Decision, num_freed_blocks: int) -> float:
    """Seconds by block that becomes free: what victims are ranked by. Infinite where none does."""
    return decision.cost_s / num_freed_blocks if num_freed_blocks > 0 else math.inf


def _wanted(mode: PreemptionMode, victim: Victim, swap_s: float, recompute_s: float) -> tuple[Outcome, Reason]:
    """What the mode asks for, whether or not there is room for it."""
    if mode == "auto":
        return ("swap" if swap_s < recompute_s else "recompute"), "cheaper"
    if mode == "heuristic":
        if victim.num_output_tokens * SHORT_OUTPUT < victim.num_prompt_tokens:
            return "recompute", "short output"
        return "swap", "long output"
    return mode, "configured"


class _Lane:
    """One direction: how fast it is, how much of it is waited for, how often it fails, and what stands in its queue."""

    def __init__(self) -> None:
        self.rate = GUESS_RATE
        self.failing_share = 0.0
        self.waited_s = 0.0
        self._copied_s = 0.0
        self._num_copies = 0
        self._mean_bytes = self._mean_s = 0.0  # of the copies that went well
        self._queue: deque[int] = deque()
        self._num_queued_bytes = 0

    @property
    def exposed_share(self) -> float:
        share = (self.waited_s + PRIOR_SHARE * PRIOR_S) / (self._copied_s + PRIOR_S)
        return min(1.0, max(LEAST_SHARE, share))

    def copy_s(self, num_bytes: int) -> float:
        return (self._num_queued_bytes + num_bytes) / self.rate

    def calibrate(self, rate: float) -> None:
        self.rate = _believable(rate)
        self._num_copies = CALIBRATION_COPIES
        self._mean_bytes = self._mean_s = 0.0  # of the size of the first copy that follows

    def forget_rate(self) -> None:
        self._num_copies = 0
        self._mean_bytes = self._mean_s = 0.0
        self.waited_s = self._copied_s = 0.0

    def on_sent(self, num_bytes: int) -> None:
        self._queue.append(num_bytes)
        self._num_queued_bytes += num_bytes

    def on_done(self, done: CopyDone) -> None:
        if self._queue:
            self._num_queued_bytes -= self._queue.popleft()
        self._copied_s += done.seconds
        self.failing_share += FAILURE_WEIGHT * ((not done.ok) - self.failing_share)
        if done.ok and done.num_bytes:
            self._learn_rate(done.num_bytes, done.seconds)

    def _learn_rate(self, num_bytes: int, seconds: float) -> None:
        self._num_copies += 1
        if not self._mean_bytes:
            self._mean_bytes, self._mean_s = num_bytes, num_bytes / self.rate
        weight = max(COPY_WEIGHT, 1.0 / self._num_copies)
        self._mean_bytes += weight * (num_bytes - self._mean_bytes)
        self._mean_s += weight * (seconds - self._mean_s)
        self.rate = _believable(self._mean_bytes / self._mean_s if self._mean_s > 0 else MOST_RATE)

    def on_step(self) -> None:
        self.waited_s *= STEP_DECAY
        self._copied_s *= STEP_DECAY

    def forget_queue(self) -> None:
        self._queue.clear()
        self._num_queued_bytes = 0


def _believable(rate: float) -> float:
    return min(MOST_RATE, rate) if rate > LEAST_RATE else LEAST_RATE  # not a number: the least
