"""The fixed workloads on an engine without a device: what is asked of it, and what is made of the times."""

import math

import anyio
import msgspec
import pytest

from repertory.actors.commands.benching import drive, fixed, workloads
from repertory.actors.commands.benching.metrics import Timeline
from repertory.protocol.errors import RequestFailedError
from repertory.protocol.sampling import SamplingParams

MEASURES = [fixed.OFFLINE, fixed.LATENCY, fixed.PREFIX, fixed.TTFT, fixed.ITL]


@pytest.fixture
def repeat(quick_engine):
    """Runs a measure once on an engine; returns (engine, figures by key, how far the bar got)."""

    def run(measure, repetitions=1, **options):
        engine, advances = quick_engine(**options), []

        async def measured():
            async with engine.open(None):
                return await fixed.repeat(measure, engine, repetitions, lambda: advances.append(1))

        figures = anyio.run(measured)
        return engine, {figure.key: figure for figure in figures}, len(advances)

    return run


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.key)
def test_each_measure_fills_its_figures_and_its_bar(repeat, measure):
    engine, figures, advanced = repeat(measure, 2)
    assert figures.keys() == measure.figures.keys()
    assert all(len(figure.values) == 2 for figure in figures.values())
    assert all(value >= 0 and math.isfinite(value) for figure in figures.values() for value in figure.values)
    assert advanced == 2 * measure.num_requests
    assert engine.num_streams == 0


def test_prompts_are_those_of_the_workload_with_ids_the_model_has(repeat):
    engine, _, _ = repeat(fixed.OFFLINE)
    measured = engine.asked[drive.WARM_UP_PROMPTS :]
    wanted = workloads.offline(1)
    assert [len(prompt) for prompt, _ in measured] == [256] * 64
    assert all(17 <= token < 1000 for prompt, _ in measured for token in prompt)
    assert {params for _, params in measured} == {
        SamplingParams(temperature=0.0, max_tokens=wanted.max_tokens, ignore_eos=True, output_kind="final_only")
    }


def test_with_the_demos_vocabulary_prompts_are_the_workloads_own(quick_engine):
    capacity = msgspec.structs.replace(quick_engine().capacity, vocab_size=workloads.VOCAB_SIZE)
    prompt = workloads.ttft(1).prompts[0]
    assert drive.fitted(prompt, 1, capacity) == prompt


@pytest.mark.parametrize(("vocab_size", "max_model_len"), [(1, 2), (17, 100), (18, 100), (320, 400)])
def test_small_models_get_prompts_that_fit(quick_engine, vocab_size, max_model_len):
    capacity = msgspec.structs.replace(quick_engine().capacity, vocab_size=vocab_size, max_model_len=max_model_len)
    prompt = drive.fitted(workloads.itl_long_prompt(1), 1, capacity)
    assert len(prompt) == max_model_len - 1
    assert all(0 <= token < vocab_size for token in prompt)


def test_each_repetition_has_other_prompts(repeat):
    engine, _, _ = repeat(fixed.TTFT, 3)
    measured = engine.asked[drive.WARM_UP_PROMPTS :]
    assert len({tuple(prompt[:16]) for prompt, _ in measured}) == 3


def test_the_cached_share_of_c_is_of_its_prompts(repeat):
    _, figures, _ = repeat(fixed.PREFIX)
    assert figures["cached_share"].values == [50.0]


def test_in_e_the_long_prompt_comes_when_all_streams_decode_and_ends_them(repeat):
    engine, _, _ = repeat(fixed.ITL)
    lengths = [len(prompt) for prompt, _ in engine.asked[drive.WARM_UP_PROMPTS :]]
    assert lengths == [64] * 8 + [4096]
    assert engine.num_streams == 0


def test_in_e_streams_that_are_over_early_do_not_make_it_wait_for_ever(repeat, quick_engine):
    capacity = quick_engine().capacity

    class Short(quick_engine):
        def generate(self, prompt, sampling_params):
            return super().generate(prompt, msgspec.structs.replace(sampling_params, max_tokens=3))

    async def run():
        engine = Short(capacity=capacity)
        async with engine.open(None):
            return await fixed.repeat(fixed.ITL, engine, 1)

    with anyio.from_thread.start_blocking_portal() as portal:
        figures = portal.start_task_soon(run).result(60)
    assert {figure.key for figure in figures} == fixed.ITL.figures.keys()


def test_gaps_are_those_before_the_long_prompt_or_those_that_overlap_its_prefill():
    stream = Timeline(sent_s=0.0, num_prompt=1, at_s=[1.0, 1.1, 1.3, 2.0, 2.5, 3.5, 9.0])
    long = Timeline(sent_s=1.9, num_prompt=4096, at_s=[3.0])
    found = fixed.gap_figures([stream], long)
    assert found == pytest.approx(
        {
            "before_p50_ms": 150.0,  # 0.1 and 0.2
            "before_max_ms": 200.0,
            "during_p50_ms": 700.0,  # 1.3 to 2.0, 2.0 to 2.5, 2.5 to 3.5
            "during_max_ms": 1000.0,
            "ttft_ms": 1100.0,
        }
    )


@pytest.mark.parametrize("measure", [fixed.OFFLINE, fixed.LATENCY, fixed.ITL], ids=lambda measure: measure.key)
def test_a_request_that_fails_ends_the_measure(repeat, measure):
    with pytest.raises((RequestFailedError, ExceptionGroup)) as caught:
        repeat(measure, fail="it broke")
    assert caught.group_contains(RequestFailedError, match="it broke") if isinstance(caught.value, ExceptionGroup) else True
