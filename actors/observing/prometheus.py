"""`CoreMetrics` in Prometheus' text format. What each metric is and where it comes from is a line of a table here.

Names are vLLM's with another prefix (`vllm:` becomes `repertory_`), units too. Nothing is kept between two calls: what
is rendered is the snapshot, by a collector in a registry of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...protocol.metrics import Bins, CoreMetrics
from ...protocol.outputs import BlockCounts
from .buckets import BUCKETS
from .periodic import device_usage, host_usage

PREFIX = "repertory_"

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of labels, and the value."""


class Line(NamedTuple):
    """One metric: what it is called, says and carries, and where it is in the snapshot. Counters get `_total` behind."""

    kind: Literal["gauge", "counter"]
    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[CoreMetrics], Samples]


def _one(value: float) -> Samples:
    return [((), value)]


def _by(values: dict[str, int] | dict[str, float]) -> Samples:
    return [((key,), value) for key, value in values.items()]


def _states(tier: str, blocks: BlockCounts) -> Samples:
    states = {"free": blocks.free, "cached": blocks.cached, "referenced": blocks.referenced}
    return [((tier, state), number) for state, number in states.items()]


_ACTOR = ("actor", "process")

LINES: tuple[Line, ...] = (
    # vLLM's
    Line("gauge", "num_requests_running", "Requests that run.", (), lambda m: _one(m.stats.num_running)),
    Line("gauge", "num_requests_waiting", "Requests that wait for the first time.", (), lambda m: _one(m.stats.num_waiting)),
    Line("gauge", "kv_cache_usage_perc", "Device blocks somebody holds, 0 to 1.", (),
         lambda m: _one(device_usage(m.stats.device_blocks))),
    Line("gauge", "kv_offload_cpu_cache_usage_perc", "Host blocks that are not free, 0 to 1.", (),
         lambda m: _one(host_usage(m.stats.host_blocks))),
    Line("counter", "prefix_cache_queries", "Prompt tokens looked up in the cache, each request's once.", (),
         lambda m: _one(m.stats.prefix_cache_queries)),
    Line("counter", "prefix_cache_hits", "Of these, tokens that the cache held.", (),
         lambda m: _one(m.stats.prefix_cache_hits)),
    Line("counter", "prompt_tokens", "Prompt tokens of requests that were admitted, each request's once.", (),
         lambda m: _one(m.num_prompt_tokens)),
    Line("counter", "prompt_tokens_cached", "Of these, tokens that were not computed.", (),
         lambda m: _one(m.stats.prefix_cache_hits)),
    Line("counter", "generation_tokens", "Tokens generated.", (), lambda m: _one(m.num_generated_tokens)),
    Line("counter", "num_preemptions", "Times that a request gave its blocks up for another.", (),
         lambda m: _one(sum(m.stats.num_preemptions.values()))),
    Line("counter", "request_success", "Requests that ended, by how.", ("finished_reason",), lambda m: _by(m.finished)),
    Line("counter", "admission_rejections", "Requests that the scheduler refused, by the error's name.", ("reason",),
         lambda m: _by(m.refused)),
    Line("gauge", "cache_config_info", "Sizes of the KV cache; always 1.",
         ("block_size", "num_device_blocks", "num_host_blocks"),
         lambda m: [((str(m.block_size), str(m.stats.device_blocks.total), str(m.stats.host_blocks.total)), 1)]),
    # requests
    Line("gauge", "num_requests_preempted", "Requests that wait to come back.", (), lambda m: _one(m.stats.num_preempted)),
    Line("gauge", "num_requests_paused", "Requests whose readers are behind.", (), lambda m: _one(m.stats.num_paused)),
    Line("gauge", "num_requests_fetching", "Requests whose blocks are being copied in.", (),
         lambda m: _one(m.stats.num_fetching)),
    Line("counter", "request_resumptions", "Admissions of requests that had been admitted before.", (),
         lambda m: _one(m.num_resumptions)),
    Line("counter", "request_stage_seconds", "What requests that have ended spent in each stage.", ("stage",),
         lambda m: _by(m.stage_s)),
    Line("gauge", "credits_outstanding", "Tokens that may be generated before readers must take some.", (),
         lambda m: _one(m.num_credits)),
    Line("counter", "non_finite_rows", "Rows whose logits were not finite.", (), lambda m: _one(m.stats.num_non_finite_rows)),
    # memory
    Line("gauge", "kv_blocks", "KV blocks by tier and state.", ("tier", "state"),
         lambda m: [*_states("device", m.stats.device_blocks), *_states("host", m.stats.host_blocks)]),
    Line("gauge", "prefix_tree_nodes", "Runs of blocks in the prefix tree.", (), lambda m: _one(m.num_tree_nodes)),
    Line("gauge", "prefix_tree_evictable_blocks", "Device blocks of the tree that nobody holds.", (),
         lambda m: _one(m.num_evictable_blocks)),
    Line("counter", "preemption_decisions", "Preemptions by mode and why that mode.", ("mode", "reason"),
         lambda m: [((mode, reason), number) for mode, reason, number in m.preemptions]),
    Line("counter", "swap_fallbacks", "Preemptions by recompute for want of host blocks.", (),
         lambda m: _one(m.stats.num_swap_fallbacks)),
    Line("counter", "host_hits", "Choices for tokens only the host holds: fetch or recompute.", ("choice",),
         lambda m: _by(m.stats.num_host_hits)),
    Line("counter", "copies", "Copies between the tiers.", ("direction",),
         lambda m: [((copy.direction,), copy.num_copies) for copy in m.copies]),
    Line("counter", "copy_failures", "Copies that failed.", ("direction",),
         lambda m: [((copy.direction,), copy.num_failed) for copy in m.copies]),
    Line("counter", "copy_bytes", "Bytes copied.", ("direction",),
         lambda m: [((copy.direction,), copy.num_bytes) for copy in m.copies]),
    Line("counter", "copy_seconds", "Seconds in which a copy ran.", ("direction",),
         lambda m: [((copy.direction,), copy.seconds) for copy in m.copies]),
    Line("counter", "copy_wait_seconds", "Seconds in which a copy waited for others.", ("direction",),
         lambda m: [((copy.direction,), copy.waited_s) for copy in m.copies]),
    Line("gauge", "copy_bandwidth_bytes_per_second", "What the next copy is expected to make.", ("direction",),
         lambda m: [((copy.direction,), copy.rate) for copy in m.copies]),
    # steps
    Line("counter", "steps", "Steps planned.", (), lambda m: _one(m.stats.num_steps)),
    Line("counter", "prefill_tokens_computed", "Tokens of prompts and resumptions that were computed.", (),
         lambda m: _one(m.num_prefill_tokens)),
    Line("counter", "computed_tokens", "Tokens of all rows of all steps.", (), lambda m: _one(m.stats.num_computed_tokens)),
    Line("counter", "step_copy_wait_seconds", "Seconds in which steps waited for copies.", (),
         lambda m: _one(m.stats.step_wait_s)),
    Line("counter", "fetch_wait_seconds", "Seconds in which nothing ran because all waited for copies.", (),
         lambda m: _one(m.stats.fetch_wait_s)),
    Line("gauge", "step_time_error_seconds", "Running mean of how wrong predictions are.", (),
         lambda m: _one(m.step_error_s)),
    # actors
    Line("gauge", "actor_inbox_depth", "Unread messages.", _ACTOR,
         lambda m: [((actor.name, actor.process), actor.depth) for actor in m.actors]),
    Line("counter", "actor_messages", "Messages handled.", _ACTOR,
         lambda m: [((actor.name, actor.process), actor.num_messages) for actor in m.actors]),
    Line("counter", "actor_turns", "Batches of messages handled, and waits that ended without one.", _ACTOR,
         lambda m: [((actor.name, actor.process), actor.num_turns) for actor in m.actors]),
    Line("counter", "actor_handler_seconds", "Time on the clock spent on them, waits for full inboxes included.", _ACTOR,
         lambda m: [((actor.name, actor.process), actor.handler_s) for actor in m.actors]),
    Line("counter", "actor_restarts", "Times an actor, or the device, was started again.", _ACTOR,
         lambda m: [(("device", "core"), m.stats.num_restarts),
                    *(((actor.name, actor.process), actor.num_restarts) for actor in m.actors if actor.name != "scheduler")]),
    Line("gauge", "frontends", "Frontends that are served.", (), lambda m: _one(m.num_frontends)),
    Line("counter", "metrics_faults", "Failures of the counting itself.", (), lambda m: _one(m.num_faults)),
)  # fmt: skip

HISTOGRAMS = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between two tokens of a sequence; rows of one step count alike.",
    "request_time_per_output_token_seconds": "Of each request: mean time of its tokens after the first.",
    "e2e_request_latency_seconds": "From arrival to the end.",
    "request_queue_time_seconds": "From arrival to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_prompt_tokens": "Tokens of prompts.",
    "request_generation_tokens": "Tokens generated for a request.",
    "request_num_preemptions": "Times that a request gave its blocks up.",
    "iteration_tokens_total": "Tokens of all rows of a step.",
    "step_time_seconds": "What steps took on the device.",
    "step_time_predicted_seconds": "What they were predicted to take, just before they were known.",
}


def render(metrics: CoreMetrics) -> bytes:
    """The text, for `Content-Type: text/plain; version=0.0.4`. A millisecond or two: call it in a thread."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(metrics))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, metrics: CoreMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        model = self._metrics.model_name
        for line in LINES:
            make = CounterMetricFamily if line.kind == "counter" else GaugeMetricFamily
            family = make(PREFIX + line.name, line.help, labels=("model_name", *line.labels))
            for labels, value in line.read(self._metrics):
                family.add_metric((model, *labels), value)
            yield family
        for name, words in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(PREFIX + name, words, labels=("model_name",))
            bins = self._metrics.bins[name]
            histogram.add_metric((model,), _cumulative(BUCKETS[name], bins), bins.total)
            yield histogram


def _cumulative(bounds: tuple[float, ...], bins: Bins) -> list[tuple[str, float]]:
    so_far, found = 0, []
    for bound, count in zip((*bounds, float("inf")), bins.counts, strict=True):
        so_far += count
        found.append(("+Inf" if bound == float("inf") else str(bound), float(so_far)))
    return found
