"""The tenant that has been served least comes first: a virtual token counter for each.

After Sheng et al., Fairness in Serving Large Language Models (OSDI 2024; 2401.00588). A tenant's counter
grows by what was really computed for it: a token of a prompt or of a resumption costs 1, a decoded one 2; what the cache
held costs nothing. The tenant with the smallest counter is next, its requests by arrival. One that comes back with nothing
waiting is lifted to the smallest counter of those that wait (if none does, of the last that did), so that idleness saves
nothing up. Requests without a tenant are one tenant.

A sequence's prompt is booked as *owed* when it is admitted, lest one tenant fill all slots before its first token
counts, and turned into what was computed step by step. Bound, as there: while two tenants wait, the service one has had and
the other has not is at most 2 x max(the longest prompt, 2 x the tokens of all that runs at once). Nobody starves: a counter
that does not move becomes the smallest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Items
from heapq import heapify, heappop, heappush, nsmallest

from ....protocol.ids import SequenceId
from ....protocol.messages import Admit
from ..sequence import Sequence, State

PREFILL_COST = 1
DECODE_COST = 2
MOST_IDLE = 4096
"""Tenants with nothing waiting whose counters are remembered. Beyond twice that the smallest are forgiven."""

LEAST_STALE = 64
"""Entries of a queue that are out of date, beyond a few for each that is not, before they are taken out."""

Tenant = str | None


class Policy:
    """One class; the tenant with the least service first."""

    def __init__(self) -> None:
        self.served: Counter[Tenant] = Counter()
        """The virtual counters, without what is owed."""
        self._owed: dict[SequenceId, int] = {}  # of prompts that are being computed
        self._owed_by: Counter[Tenant] = Counter()
        self._queues: dict[Tenant, deque[Sequence]] = {}  # ended ones included, until they come to the front
        self._waiting: dict[SequenceId, Sequence] = {}
        self._num_waiting: Counter[Tenant] = Counter()
        self._heap: list[tuple[int, int, Tenant]] = []  # counter, number of the entry, tenant; old entries included
        self._num_entries = 0
        self._last_to_wait: Tenant = None

    def priority_class(self, admit: Admit) -> int:
        """All requests are of one class."""
        return 0

    def admits_beside(self, num_running: int) -> bool:
        """Always: continuous batching."""
        return True

    # ---- who waits ------------------------------------------------------------------------------

    def on_queued(self, seq: Sequence) -> None:
        """Only the new are ordered: the preempted come before them."""
        if seq.state is not State.WAITING:
            return
        tenant = seq.admit.tenant
        if tenant not in self._num_waiting:
            self._lift(tenant)
        self._num_waiting[tenant] += 1
        self._waiting[seq.seq_id] = seq
        self._queues.setdefault(tenant, deque()).append(seq)
        self._offer(tenant)

    def on_left(self, seq: Sequence) -> None:
        """It waits no more; and owes nothing more, if it ran."""
        if self._waiting.pop(seq.seq_id, None) is not None:
            self._has_left(seq.admit.tenant)
        self._settle(seq)

    def on_admitted(self, seq: Sequence) -> None:
        """What it has to compute is owed from here on."""
        self.on_left(seq)
        self._owe(seq, PREFILL_COST * seq.num_remaining)

    def next_of(self, waiting: Items[Sequence], recovery: Items[Sequence]) -> Sequence | None:
        """The preempted, then the oldest of the tenant with the least service."""
        if recovery:
            return recovery[0]
        tenants = self._least_served()
        return self._front(tenants[0]) if tenants else None

    def _has_left(self, tenant: Tenant) -> None:
        self._num_waiting[tenant] -= 1
        queue = self._queues[tenant]
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant], self._queues[tenant]
            self._last_to_wait = tenant
        elif len(queue) > 2 * self._num_waiting[tenant] + LEAST_STALE:
            self._queues[tenant] = deque(seq for seq in queue if seq.seq_id in self._waiting)

    def _front(self, tenant: Tenant) -> Sequence:
        queue = self._queues[tenant]
        while queue[0].seq_id not in self._waiting:
            queue.popleft()
        return queue[0]

    # ---- who has had what -----------------------------------------------------------------------

    def counter(self, tenant: Tenant) -> int:
        """A tenant's virtual token counter."""
        return self.served[tenant] + self._owed_by[tenant]

    def on_computed(self, rows: Items[Sequence], num_tokens: Items[int], num_decodes: int) -> None:
        """Each tenant is charged for its rows, whether or not anybody wants their tokens any more."""
        costs = Counter(seq.admit.tenant for seq in rows[:num_decodes])  # of a token each
        for tenant in costs:
            costs[tenant] *= DECODE_COST
        for seq, count in zip(rows[num_decodes:], num_tokens[num_decodes:], strict=True):
            costs[seq.admit.tenant] += PREFILL_COST * count
            self._pay(seq, PREFILL_COST * count)
        for tenant, cost in costs.items():
            self.served[tenant] += cost
            self._offer(tenant)
        if len(self.served) > 2 * MOST_IDLE + len(self._num_waiting):
            self._forgive()

    def _owe(self, seq: Sequence, cost: int) -> None:
        self._owed[seq.seq_id] = cost
        self._owed_by[seq.admit.tenant] += cost
        self._offer(seq.admit.tenant)

    def _pay(self, seq: Sequence, cost: int) -> None:
        """Part of what it owed was computed. What is left when its prompt is done, the cache had after all."""
        owed = self._owed.get(seq.seq_id)
        if owed is None:
            return
        if cost >= owed or not seq.is_prefilling:
            self._settle(seq)
        else:
            self._owed[seq.seq_id] = owed - cost
            self._owed_by[seq.admit.tenant] -= cost

    def _settle(self, seq: Sequence) -> None:
        owed, tenant = self._owed.pop(seq.seq_id, 0), seq.admit.tenant
        if owed:
            self._owed_by[tenant] -= owed
            self._offer(tenant)
        if tenant in self._owed_by and not self._owed_by[tenant]:
            del self._owed_by[tenant]

    def _lift(self, tenant: Tenant) -> None:
        """It comes back with nothing waiting: what others were served meanwhile is not owed to it."""
        tenants = self._least_served()
        level = self.counter(tenants[0] if tenants else self._last_to_wait)
        self.served[tenant] += max(0, level - self.counter(tenant))

    def _forgive(self) -> None:
        """Nothing grows without bound: of many who do not wait, those with the least service begin anew."""
        idle = [tenant for tenant in self.served if tenant not in self._num_waiting and tenant != self._last_to_wait]
        for tenant in nsmallest(len(idle) - MOST_IDLE, idle, key=self.counter):
            del self.served[tenant]

    # ---- the order of tenants -------------------------------------------------------------------

    def _least_served(self) -> list[Tenant]:
        """The tenant next in turn among those that wait, or nothing. Equals go by who came to that count first."""
        while self._heap:
            counter, _, tenant = self._heap[0]
            if tenant in self._num_waiting and counter == self.counter(tenant):
                return [tenant]
            heappop(self._heap)
        return []

    def _offer(self, tenant: Tenant) -> None:
        """Its counter has changed, or it waits now: enter it anew."""
        if tenant not in self._num_waiting:
            return
        self._num_entries += 1
        heappush(self._heap, (self.counter(tenant), self._num_entries, tenant))
        if len(self._heap) > 4 * len(self._num_waiting) + LEAST_STALE:
            latest = {one: entry for entry, one in sorted((entry, one) for _, entry, one in self._heap)}
            self._heap = [(self.counter(one), latest[one], one) for one in self._num_waiting]
            heapify(self._heap)
