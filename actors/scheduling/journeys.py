"""Where each sequence's time goes, while it goes: a stage at a time, at the price of its changes and of nothing per token.

What other requests' prefills cost is counted once for all. A step that computes chunks lasts longer by some seconds: the
running sum of these, `Stalls.total_s`, is what everybody who runs is held up by, those whose chunks they are less by
their own part. A leg of prefill or decode notes the sum at its beginning and at its end, so a step costs the same however
many decode beside it. Whose chunks they were is remembered for the last `MOST_EPISODES` of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items

from ...protocol.ids import RequestId
from ...protocol.journey import MOST_BLAMED, MOST_LEGS, Journey, Leg, Stage

MOST_EPISODES = 512


class Episode:
    """Chunks of one request in steps one after the other: from when to when, and how many seconds longer these took."""

    __slots__ = ("end_s", "request_id", "seconds", "start_s")

    def __init__(self, request_id: RequestId, start_s: float, end_s: float, seconds: float) -> None:
        self.request_id = request_id
        self.start_s = start_s
        self.end_s = end_s
        self.seconds = seconds


class Own:
    """What the chunks of one request, of all its sequences, have cost everybody so far, in seconds."""

    __slots__ = ("total_s",)

    def __init__(self) -> None:
        self.total_s = 0.0


class Stalls:
    """The clock of all journeys of one scheduler, and what prefills have cost so far. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        """The latest moment that anybody has spoken of."""
        self.total_s = 0.0
        self._last_done_s = 0.0
        self._episodes: deque[Episode] = deque(maxlen=MOST_EPISODES)

    def at(self, now: float) -> None:
        """It is `now`, or was already."""
        self.now = max(self.now, now)

    def on_step_done(self, sent_s: float, share: float, chunks: Items[tuple[Own, RequestId, int]]) -> None:
        """A step that was sent at `sent_s` has ended. `share` of the time it took was its `chunks`': whose, and tokens."""
        start_s = max(self._last_done_s, sent_s)
        self._last_done_s = self.now
        if not chunks:
            return
        cost_s = share * max(0.0, self.now - start_s)
        self.total_s += cost_s
        num_tokens = sum(count for _, _, count in chunks)
        for own, request_id, count in chunks:
            own_s = cost_s * count / num_tokens
            own.total_s += own_s
            self._note(request_id, start_s, own_s)

    def _note(self, request_id: RequestId, start_s: float, seconds: float) -> None:
        last = self._episodes[-1] if self._episodes else None
        if last is not None and last.request_id == request_id:
            last.end_s = self.now
            last.seconds += seconds
        else:
            self._episodes.append(Episode(request_id, start_s, self.now, seconds))

    def blame(self, start_s: float, end_s: float, own: RequestId) -> dict[RequestId, float]:
        """Seconds between two moments by the requests whose chunks they were, without one's own."""
        found: dict[RequestId, float] = {}
        for episode in reversed(self._episodes):
            if episode.end_s <= start_s:
                break
            overlap_s = min(end_s, episode.end_s) - max(start_s, episode.start_s)
            if overlap_s > 0 and episode.request_id != own:
                part = overlap_s / (episode.end_s - episode.start_s)
                found[episode.request_id] = found.get(episode.request_id, 0.0) + part * episode.seconds
        return found


class Traveller:
    """One sequence's journey so far. It begins with reading its prompt, at `arrival_s`, and is queued now."""

    __slots__ = ("_arrival_s", "_blamed", "_legs", "_mark_s", "_request_id", "_since_s", "_stalls", "own", "stage")

    def __init__(self, request_id: RequestId, arrival_s: float, stalls: Stalls, own: Own) -> None:
        self._request_id = request_id
        self._arrival_s = min(arrival_s, stalls.now)
        self._stalls = stalls
        self._legs: list[Leg] = []
        self._blamed: dict[RequestId, float] = {}
        self._since_s = self._arrival_s
        self.own = own
        """Its request's, shared with the other sequences: a prompt that one of them computes holds none of them up."""
        self._mark_s = 0.0  # what others' chunks had cost when this leg began
        self.stage: Stage = "tokenise"
        self.enter("queue")

    def enter(self, stage: Stage) -> None:
        """A new leg begins now, unless it is in that stage already."""
        if stage != self.stage:
            self._end_leg()
            self.stage = stage

    def reached_decode(self) -> None:
        """A token has come."""
        if self.stage == "prefill":
            self.enter("decode")

    def ends(self) -> Journey:
        """All legs up to now."""
        self._end_leg()
        most = sorted(self._blamed.items(), key=lambda item: -item[1])[:MOST_BLAMED]
        return Journey(self._legs, [(request_id, seconds) for request_id, seconds in most if seconds > 0])

    @property
    def _others_s(self) -> float:
        return self._stalls.total_s - self.own.total_s

    def _end_leg(self) -> None:
        start_s, now, stalled_s = self._since_s, self._stalls.now, 0.0
        if self.stage in ("prefill", "decode"):
            stalled_s = min(max(0.0, self._others_s - self._mark_s), now - start_s)
            if stalled_s > 0:
                for request_id, seconds in self._stalls.blame(start_s, now, self._request_id).items():
                    self._blamed[request_id] = self._blamed.get(request_id, 0.0) + seconds
        self._since_s, self._mark_s = now, self._others_s
        if now == start_s:
            return
        leg = Leg(self.stage, start_s - self._arrival_s, now - self._arrival_s, stalled_s)
        if len(self._legs) == MOST_LEGS:
            last = self._legs.pop()
            leg = Leg(self.stage, last.start_s, leg.end_s, last.stalled_s + stalled_s)
        self._legs.append(leg)


def handed_over(journey: Journey, made_s: float, sent_s: float) -> Journey:
    """The journey to its real end: its last text was made and then handed over, in seconds since the arrival.

    Where a stop string ended it, that was seen when the text was made, before the scheduler knew: what came later is
    not part of it.
    """
    legs: list[Leg] = []
    for leg in journey.legs:
        if leg.end_s <= made_s:
            legs.append(leg)
        elif leg.start_s < made_s:
            legs.append(Leg(leg.stage, leg.start_s, made_s, min(leg.stalled_s, made_s - leg.start_s)))
    end_s = legs[-1].end_s if legs else 0.0
    for stage, until_s in (("detokenise", made_s), ("send", sent_s)):
        if until_s > end_s:
            legs.append(Leg(stage, end_s, until_s))  # type: ignore[arg-type]  # both are stages
            end_s = until_s
    return Journey(legs, journey.stalled_by)
