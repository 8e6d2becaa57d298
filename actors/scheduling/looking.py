"""A look at the scheduler from outside: snapshots of its counts, and who is there. Changes nothing.

Costs a few microseconds for each live request, and looks at `MOST_NODES` nodes of the prefix tree at most.
"""

from __future__ import annotations

from collections import deque
from heapq import nlargest, nsmallest
from typing import TYPE_CHECKING

from ...protocol.journey import Stage
from ...protocol.metrics import ActorLoad, CoreMetrics
from ...protocol.view import MOST_PREFIXES, MOST_SLOWEST, CompanyView, SharedPrefix, SlowRequest
from ...radix.node import Node
from ...radix.tree import PrefixTree
from .request import Request

if TYPE_CHECKING:
    from .core import SchedulerCore

MOST_NODES = 2000
MOST_LABEL = 80
"""Characters of a label that are shown."""

_FURTHEST_FIRST: tuple[Stage, ...] = ("decode", "prefill", "fetch", "restart", "preempted", "paused", "blocks", "queue")


def metrics_of(core: SchedulerCore, actors: list[ActorLoad], *, num_frontends: int) -> CoreMetrics:
    """All that is counted."""
    counts, pressure = core.telling.counts, core.pressure
    copies = [one.taken(direction, rate=pressure.cost.rate(direction)) for direction, one in counts.copies.items()]
    return CoreMetrics(
        model_name=model_name_of(core),
        block_size=core.capacity.block_size,
        stats=core.stats(),
        num_prompt_tokens=counts.num_prompt_tokens,
        num_prefill_tokens=counts.num_prefill_tokens,
        num_generated_tokens=counts.num_generated_tokens,
        num_resumptions=counts.num_resumptions,
        finished=dict(counts.finished),
        refused=dict(counts.refused),
        preemptions=[(mode, reason, count) for (mode, reason), count in counts.preemptions.items()],
        copies=copies,
        bins={name: histogram.taken() for name, histogram in counts.histograms.items()},
        stage_s=dict(counts.stage_s),
        num_tree_nodes=core.cache.tree.num_nodes,
        num_evictable_blocks=core.cache.tree.num_evictable,
        num_credits=_credits(core),
        step_error_s=core.pacer.model.error_s,
        actors=actors,
        num_frontends=num_frontends,
        num_faults=counts.num_faults,
    )


def view_of(core: SchedulerCore, now: float, actors: list[ActorLoad], *, num_frontends: int) -> CompanyView:
    """What there is to see now."""
    counts = core.telling.counts
    return CompanyView(
        at_s=now,
        model_name=model_name_of(core),
        device=core.capacity.device,
        block_size=core.capacity.block_size,
        running_limit=core.config.running_limit,
        stats=core.stats(),
        num_prefill_tokens=counts.num_prefill_tokens,
        num_generated_tokens=counts.num_generated_tokens,
        step_s=counts.step_s,
        num_finished=sum(counts.finished.values()),
        actors=actors,
        prefixes=shared_prefixes(core.cache.tree),
        slowest=slowest_requests(core, now, MOST_SLOWEST),
        num_frontends=num_frontends,
    )


def model_name_of(core: SchedulerCore) -> str:
    """As clients know it."""
    return core.config.served_model_name or core.config.model


def _credits(core: SchedulerCore) -> int:
    left = (seq.credit_length - seq.length for seq in core.table.sequences.values() if seq.credit_length != float("inf"))
    return int(sum(max(0, tokens) for tokens in left))


# ---- who is there -------------------------------------------------------------------------------


def slowest_requests(core: SchedulerCore, now: float, most: int) -> list[SlowRequest]:
    """Those that have been here for the longest."""
    oldest = nsmallest(most, core.table.requests(), key=lambda request: request.admit.arrival_s)
    return [_shown(request, now) for request in oldest]


def _shown(request: Request, now: float) -> SlowRequest:
    admit = request.admit
    return SlowRequest(
        admit.request_id,
        admit.label[:MOST_LABEL],
        max(0.0, now - admit.arrival_s),
        _stage(request),
        len(admit.token_ids),
        sum(seq.num_output_tokens for seq in request.sequences),
    )


def _stage(request: Request) -> Stage:
    """Of a request with several sequences: the stage of the one that is furthest."""
    return min((seq.traveller.stage for seq in request.live()), key=_FURTHEST_FIRST.index)


# ---- what they share ----------------------------------------------------------------------------


def shared_prefixes(tree: PrefixTree) -> list[SharedPrefix]:
    """The prefixes that save the most: length times those who share it, holders now or ways to go on."""
    found: list[tuple[int, int, SharedPrefix]] = []
    unseen: deque[tuple[Node, int, int]] = deque((root, 0, 0) for root in tree.roots())
    num_seen = 0
    while unseen and num_seen < MOST_NODES:
        node, num_device, num_host = unseen.popleft()
        num_seen += 1
        num_device += node.num_ready
        num_host += node.num_saved
        children = [child for bucket in node.children.values() for child in bucket]
        num_sharers = max(node.locks, len(children))
        # A run that goes on with as many holders is part of a longer prefix.
        is_end = all(child.locks < node.locks for child in children) or len(children) > 1
        if node.parent is not None and num_sharers > 1 and is_end:
            size = tree.block_size
            prefix = SharedPrefix(node.end * size, node.locks, len(children), num_device * size, num_host * size)
            found.append((prefix.num_tokens * num_sharers, num_seen, prefix))
        unseen.extend((child, num_device, num_host) for child in children if child.locks > 1 or child.children)
    return [prefix for _, _, prefix in nlargest(MOST_PREFIXES, found)]
