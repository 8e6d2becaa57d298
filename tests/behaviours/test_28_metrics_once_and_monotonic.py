"""metrics-once-and-monotonic: 100 random prompts without common prefixes, then 100 with one, under pressure.

Memory is so short that admissions are tried again and requests are preempted, by both modes.
"""

import asyncio
import itertools
import random
from collections import Counter

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from repertory.actors.scheduling.sequence import State
from repertory.tests.engine.stage import LETTERS, greedy

NUM_REQUESTS = 100
PRESSURE = {
    "block_size": 4,
    "num_device_blocks": 64,
    "num_host_blocks": 40,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
}
DURATIONS = ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time", "time_to_first_token")


def samples(text):
    """Every sample of the text, by name and labels."""
    families = text_string_to_metric_families(text.decode())
    return {
        (one.name, *sorted(one.labels.items())): one.value
        for family in families
        if family.type in ("counter", "histogram")
        for one in family.samples
    }


def random_prompts(draw):
    return [draw.choices(LETTERS, k=draw.randrange(12, 40)) for _ in range(NUM_REQUESTS)]


def prompts_with_a_common_prefix(draw):
    common = draw.choices(LETTERS, k=32)
    return [common + draw.choices(LETTERS, k=draw.randrange(2, 8)) for _ in range(NUM_REQUESTS)]


async def serve(stage, prompts):
    """Serve the prompts side by side; returns the outputs, and the counters as they were at each end on the way."""
    tasks = [stage.begin(prompt, greedy(10 + number % 20)) for number, prompt in enumerate(prompts)]
    seen = [samples(await stage.engine.metrics_text())]
    for number, ended in enumerate(asyncio.as_completed(tasks)):
        await ended
        if number % 8 == 0:
            seen.append(samples(await stage.engine.metrics_text()))
    assert await stage.engine._company.settle(3.0)
    seen.append(samples(await stage.engine.metrics_text()))
    return [task.result() for task in tasks], seen


def watch_ends_outside(core):
    """The sequences whose last token was still in flight when they were preempted: they end without coming back."""
    ended, close = [], core._close

    def watching(seq, **how):
        if seq.state is State.PREEMPTED:
            ended.append(seq.seq_id)
        close(seq, **how)

    core._close = watching
    return ended


def check_monotonic(seen):
    for before, after in itertools.pairwise(seen):
        assert before.keys() <= after.keys()
        fallen = {key: (value, after[key]) for key, value in before.items() if after[key] < value}
        assert not fallen
    assert all(value >= 0 for one in seen for value in one.values())


async def test_every_request_is_counted_once_whatever_happens_to_it(stage):
    draw = random.Random(28)
    on = await stage(**PRESSURE)
    on.admit_carelessly()
    ended_outside = watch_ends_outside(on.engine._company.scheduler.core)
    unlike, seen_first = await serve(on, random_prompts(draw))
    first = await on.engine.metrics()
    alike, seen_second = await serve(on, prompts_with_a_common_prefix(draw))
    metrics = await on.engine.metrics()

    check_monotonic(seen_first + seen_second)
    assert first.stats.num_preemptions["recompute"] + first.stats.num_preemptions["swap"] > 20, "there was no pressure"
    outputs = [*unlike, *alike]
    assert metrics.num_prompt_tokens == sum(len(one.prompt_token_ids) for one in outputs)
    assert metrics.stats.prefix_cache_queries == metrics.num_prompt_tokens
    assert metrics.stats.prefix_cache_hits == sum(one.num_cached_tokens for one in outputs)
    assert metrics.num_generated_tokens == sum(len(one.outputs[0].token_ids) for one in outputs)
    assert metrics.finished == {"stop": 0, "length": 2 * NUM_REQUESTS, "abort": 0, "error": 0}
    assert not metrics.num_faults

    assert first.stats.prefix_cache_hits / first.stats.prefix_cache_queries < 0.02
    hits = metrics.stats.prefix_cache_hits - first.stats.prefix_cache_hits
    assert 0.3 < hits / (metrics.stats.prefix_cache_queries - first.stats.prefix_cache_queries) <= 1

    num_preemptions = sum(one.metrics.num_preemptions for one in outputs)
    assert sum(count for _, _, count in metrics.preemptions) == num_preemptions == sum(metrics.stats.num_preemptions.values())
    by_mode = Counter()
    for mode, _, count in metrics.preemptions:
        by_mode[mode] += count
    assert dict(by_mode) == {mode: count for mode, count in metrics.stats.num_preemptions.items() if count}
    back = num_preemptions - len(ended_outside)
    assert metrics.num_resumptions == back, "each came back or was ended by a token in flight; nothing else counts there"


async def test_histograms_hold_each_request_and_each_token_once(stage):
    on = await stage(**PRESSURE)
    on.admit_carelessly()
    outputs, _ = await serve(on, random_prompts(random.Random(3)))
    metrics = await on.engine.metrics()
    assert sum(metrics.stats.num_preemptions.values()) > 20
    for name in DURATIONS:
        assert sum(metrics.bins[f"{name}_seconds"].counts) == NUM_REQUESTS
    num_tokens = sum(len(one.outputs[0].token_ids) for one in outputs)
    gaps = metrics.bins["inter_token_latency_seconds"]
    assert sum(gaps.counts) == num_tokens - NUM_REQUESTS, "every token but each request's first"
    decoding = sum(one.metrics.last_token - one.metrics.first_token for one in outputs)
    assert gaps.total == pytest.approx(decoding, rel=0.05), "but for rows that sat out a step"
    assert metrics.bins["request_prompt_tokens"].total == sum(len(one.prompt_token_ids) for one in outputs)
    assert metrics.bins["iteration_tokens_total"].total == metrics.stats.num_computed_tokens


async def test_a_clock_that_is_ahead_makes_no_duration_negative(stage):
    on = await stage(block_size=4)
    core = on.engine._company.scheduler.core
    admit = core.on_admit

    def from_the_future(message, now):
        admit(msgspec.structs.replace(message, arrival_s=now + 3600.0), now)

    core.on_admit = from_the_future
    await on.ask(list(LETTERS[:9]), greedy(4))
    metrics = await on.engine.metrics()
    for name in DURATIONS:
        assert metrics.bins[f"{name}_seconds"].total >= 0
        assert sum(metrics.bins[f"{name}_seconds"].counts) == 1


@pytest.mark.parametrize("broken", ["histograms", "finished", "copies", "preemptions"])
async def test_a_problem_in_metrics_fails_no_request(stage, broken):
    on = await stage(**PRESSURE)
    on.admit_carelessly()
    counts = on.engine._company.scheduler.core.telling.counts
    setattr(counts, broken, None)
    prompts = random_prompts(random.Random(5))[:30]
    outputs = await asyncio.gather(*(on.begin(prompt, greedy(25)) for prompt in prompts))
    assert [one.outputs[0].token_ids for one in outputs] == [on.alone(prompt, greedy(25)).token_ids for prompt in prompts]
    assert counts.num_faults > 0
    assert counts.fault is not None
    assert (await on.engine.stats()).num_running == 0
