"""The metrics as text: complete, well-formed, named as dashboards expect, and each name in the dashboard exists."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import repertory
from repertory.actors.mailbox import Mailbox
from repertory.actors.observing.buckets import BUCKETS
from repertory.actors.observing.loads import load_of
from repertory.actors.observing.prometheus import HISTOGRAMS, LINES, PREFIX, render
from repertory.actors.scheduling.counts import Histogram
from repertory.actors.scheduling.looking import metrics_of
from repertory.tests.scheduling.world import World

DASHBOARD = Path(repertory.__file__).parent / "examples" / "observability" / "grafana-dashboard.json"

VLLM_NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "prompt_tokens_cached_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "iteration_tokens_total_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "cache_config_info",
}


@pytest.fixture
def world():
    """A scheduler that has served, preempted, refused and copied."""
    world = World(blocks=12, host_blocks=8, max_num_seqs=4, preemption_mode="swap")
    world.without_reserve()
    for number in range(8):
        world.submit([number] * 9, max_tokens=16)
    world.submit(list(range(1000)), max_tokens=1)
    world.run()
    return world


def metrics_in(world):
    return metrics_of(world.core, [load_of(Mailbox("scheduler", 3), "core")], num_frontends=1)


def families_of(world):
    text = render(metrics_in(world)).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def names_of(world):
    return {sample.name for family in families_of(world).values() for sample in family.samples}


def test_names_are_vllms_with_our_prefix(world):
    assert {PREFIX + name for name in VLLM_NAMES} <= names_of(world)


def test_every_metric_has_help_and_samples_with_the_models_name(world):
    families = families_of(world)
    assert len(families) == len(LINES) + len(HISTOGRAMS)
    for family in families.values():
        assert family.documentation.endswith(".")
        assert all(sample.labels["model_name"] == "simulated" for sample in family.samples)
    empty = {name for name, family in families.items() if not family.samples}
    assert empty <= {"repertory_request_stage_seconds"}


def test_every_histogram_has_buckets_and_the_reverse():
    assert HISTOGRAMS.keys() == BUCKETS.keys()
    assert all(list(bounds) == sorted(set(bounds)) for bounds in BUCKETS.values())


def test_buckets_are_cumulative_and_end_with_the_count(world):
    for name in HISTOGRAMS:
        samples = families_of(world)[PREFIX + name].samples
        buckets = [sample for sample in samples if sample.name.endswith("_bucket")]
        values = [sample.value for sample in buckets]
        assert values == sorted(values)
        assert [float(sample.labels["le"]) for sample in buckets] == [*BUCKETS[name], float("inf")]
        (count,) = [sample.value for sample in samples if sample.name.endswith("_count")]
        assert values[-1] == count == sum(metrics_in(world).bins[name].counts)


def test_a_value_falls_into_the_first_bucket_that_holds_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 7.0, -3.0):
        histogram.add(value)
    histogram.add(1.25, 10)
    assert histogram.taken().counts == [3, 12, 1]
    assert histogram.taken().total == pytest.approx(0.5 + 1 + 1.5 + 2 + 7 + 0 + 12.5)


def test_values_are_the_snapshots(world):
    metrics, families = metrics_in(world), families_of(world)

    def value(name, **labels):
        samples = [sample for family in families.values() for sample in family.samples if sample.name == PREFIX + name]
        (found,) = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
        return found

    assert value("request_success_total", finished_reason="length") == 8
    assert value("admission_rejections_total", reason="NeverFitsError") == 1
    assert value("prompt_tokens_total") == 8 * 9
    assert value("generation_tokens_total") == 8 * 16
    assert value("copy_bytes_total", direction="out") == metrics.stats.swap_out_bytes
    assert value("preemption_decisions_total", mode="swap", reason="configured") == metrics.stats.num_preemptions["swap"] > 0
    assert value("kv_blocks", tier="device", state="free") == metrics.stats.device_blocks.free
    assert value("prefix_tree_nodes") == len(list(world.core.cache.tree.nodes()))
    assert value("actor_inbox_depth", actor="scheduler", process="core") == 0


def expressions():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def test_every_metric_that_the_dashboard_names_exists_with_its_labels(world):
    # A metric without samples has no labels to compare; its name is in the table.
    known = names_of(world) | {f"{PREFIX}{line.name}_total" for line in LINES if line.kind == "counter"}
    labels = {f"{PREFIX}{line.name}{'_total' * (line.kind == 'counter')}": {"model_name", *line.labels} for line in LINES}
    found = list(expressions())
    assert len(found) > 30
    for title, expression in found:
        names = re.findall(rf"{PREFIX}\w+", expression)
        assert names, title
        for name in names:
            assert name in known, f"{title}: {name} does not exist"
            grouped = re.findall(r"by \(([^)]*)\)", expression)
            for label in {label.strip() for group in grouped for label in group.split(",")} - {"le"}:
                assert label in labels[name], f"{title}: {name} has no label {label}"


def test_the_dashboard_has_a_row_for_users_scheduler_cache_and_actors():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ["Users", "Scheduler", "KV cache", "Actors"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]}
    assert len(places) == len(dashboard["panels"])
