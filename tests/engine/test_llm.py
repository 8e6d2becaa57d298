"""LLM: the engine for code that is not asynchronous."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from repertory import (
    LLM,
    ConfigError,
    EngineConfig,
    EngineDeadError,
    ModelLoadError,
    NeverFitsError,
    SamplingParams,
    ValidationError,
)
from repertory.gpu.simulated import SimulatedExecutor
from repertory.tests.engine.stage import EOS, Answer, answer_of, check_threads_have_ended, greedy, prompt_of

DEVICES: dict[str, int] = {"block_size": 4, "num_device_blocks": 64, "vocab_size": 320, "max_model_len": 512}


@pytest.fixture
def device() -> SimulatedExecutor:
    return SimulatedExecutor(**DEVICES, reserved_ids={EOS}, record=True)


@pytest.fixture
def make(paper_model: Path, log_lines, device):
    """Makes an LLM on the simulated device; its threads must be gone at the end of the test."""
    made = []
    before = set(threading.enumerate())

    def make_llm(**settings):
        made.append(
            LLM(model=str(paper_model), open_device=lambda config, model_dir: device, **{"max_restarts": 0, **settings})
        )
        return made[-1]

    yield make_llm
    for llm in made:
        llm.close()
    left = [
        thread.name for thread in set(threading.enumerate()) - before if "repertory" in thread.name or "portal" in thread.name
    ]
    assert not left


def alone(device: SimulatedExecutor, prompt: list[int], max_tokens: int) -> list[int]:
    return device.reference(prompt, greedy(), max_tokens)


def test_results_come_in_the_order_of_the_prompts(make, device):
    llm = make()
    # Different lengths, so that they end in another order.
    prompts = [prompt_of(5, seed) for seed in range(8)]
    params = [greedy(20 - 2 * seed) for seed in range(8)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [
        alone(device, prompt, one.max_tokens) for prompt, one in zip(prompts, params, strict=True)
    ]
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(output.finished for output in outputs)


def test_one_prompt_gives_one_result_and_none_gives_none(make, device):
    llm = make()
    (text,) = llm.generate("hello", greedy())
    assert text.prompt == "hello"
    (ids,) = llm.generate(prompt_of(5), greedy())
    assert ids.outputs[0].token_ids == alone(device, prompt_of(5), 5)
    assert (llm.generate([]), llm.chat([])) == ([], [])
    assert len(llm.generate(("a", "b"), greedy())) == 2


def test_the_same_prompt_many_times_is_many_requests(make, device):
    outputs = make().generate([prompt_of(9)] * 12, greedy(4))
    assert [output.outputs[0].token_ids for output in outputs] == [alone(device, prompt_of(9), 4)] * 12
    assert len({output.request_id for output in outputs}) == 12


def test_without_parameters_the_defaults_go_for_all(make):
    outputs = make().generate(["a", "b"])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [16, 16]


def test_any_kind_of_output_is_the_whole_of_it(make, device):
    llm = make()
    for kind in ("delta", "cumulative", "final_only"):
        (output,) = llm.generate(prompt_of(5), greedy(output_kind=kind))
        assert output.outputs[0].token_ids == alone(device, prompt_of(5), 5)


def test_chat_answers_one_conversation_or_several(make):
    llm = make()
    conversation = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(conversation, greedy())
    assert one.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    two = llm.chat([conversation, [*conversation, {"role": "assistant", "content": "yes"}]], [greedy(1), greedy(2)])
    assert [len(output.outputs[0].token_ids) for output in two] == [1, 2]
    with pytest.raises(ValidationError, match=r"LLM\.chat"):
        llm.generate(conversation)


@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [("", greedy(), ValidationError), (prompt_of(600), greedy(), NeverFitsError), ([5, -1], greedy(), ValidationError),
     ("a", greedy(0), ValidationError), ("a", SamplingParams(prompt_logprobs=99), ValidationError)],
    ids=["empty", "too long", "bad id", "bad value", "too many"],
)  # fmt: skip
def test_the_whole_list_is_validated_before_any_starts(make, device, place, prompt, params, error):
    llm = make()
    prompts, all_params = ["good"] * 6, [greedy()] * 6
    prompts[place], all_params[place] = prompt, params
    with pytest.raises(error):
        llm.generate(prompts, all_params)
    assert device.steps == []
    assert len(llm.generate(["good"] * 2, greedy())) == 2


def test_as_many_parameters_as_prompts_are_wanted(make):
    with pytest.raises(ValidationError, match="1 sampling_params for 2 prompts"):
        make().generate(["a", "b"], [greedy()])


@pytest.mark.parametrize("wrong", [{"max_tokens": 5}, [{"max_tokens": 5}], [None], 5], ids=repr)
def test_parameters_of_another_type_are_refused_by_name(make, wrong):
    with pytest.raises(ValidationError, match="sampling_params"):
        make().generate(["a"], wrong)


@pytest.mark.parametrize("settings", [{"max_num_queued": 1}, {"max_num_queued": 3, "max_num_seqs": 2}], ids=str)
def test_a_list_longer_than_the_queue_is_fed_in_as_it_empties(make, device, settings):
    llm = make(**settings)
    prompts = [prompt_of(6, seed) for seed in range(40)]
    outputs = llm.generate(prompts, greedy(3))
    assert [output.outputs[0].token_ids for output in outputs] == [alone(device, prompt, 3) for prompt in prompts]


def test_several_threads_may_use_one_llm(make, device):
    llm = make()
    found: dict[int, list[list[int]]] = {}

    def use(lane: int) -> None:
        outputs = llm.generate([prompt_of(6, lane + 10 * n) for n in range(5)], greedy(4))
        found[lane] = [output.outputs[0].token_ids for output in outputs]

    threads = [threading.Thread(target=use, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {lane: [alone(device, prompt_of(6, lane + 10 * n), 4) for n in range(5)] for lane in range(4)}


def test_nothing_is_left_after_a_run(make):
    llm = make()
    llm.generate(["a", "b"], greedy())
    assert llm._portal.call(llm.engine.audit) == []


def test_a_closed_llm_says_so(make):
    llm = make()
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("a")
    with pytest.raises(EngineDeadError, match="closed"):
        llm.chat([{"role": "user", "content": "a"}])


def test_with_and_the_garbage_collector_close_it(paper_model, log_lines):
    before = threading.enumerate()
    with LLM(model=str(paper_model), device="simulated", worker="inline") as llm:
        llm.generate("a", greedy())
    check_threads_have_ended(before)
    dropped = LLM(EngineConfig(model=str(paper_model), device="simulated", worker="inline"))
    del dropped
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "repertory-compute"]


@pytest.mark.parametrize(
    ("settings", "error"), [({"model": "/nowhere"}, ModelLoadError), ({"max_model_len": 10**6}, ConfigError)], ids=str
)
def test_what_keeps_it_from_starting_is_raised_as_it_is(paper_model, log_lines, settings, error):
    with pytest.raises(error):
        LLM(**{"model": str(paper_model), "device": "simulated", "worker": "inline", **settings})
    assert not [thread for thread in threading.enumerate() if thread.name == "repertory-compute"]


def test_a_device_that_fails_is_raised_as_the_engines_death(make, device):
    llm = make()

    def burn(step):
        raise OSError("the device is on fire")

    device.on_step = burn
    with pytest.raises(EngineDeadError, match="on fire"):
        llm.generate(["a", "b", "c"], greedy())
    with pytest.raises(EngineDeadError, match="on fire"):
        llm.generate("a")


def test_a_request_that_fails_inside_is_an_output_among_the_others(make, device):
    device.fail_rows = lambda step: [new.seq_id for new in step.admitted if new.num_prompt_tokens == 7]
    outputs = make().generate([prompt_of(5), prompt_of(7), prompt_of(6)], greedy(3))
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert answer_of(outputs[1]) == Answer([], "", "error")
    assert "not finite" in outputs[1].outputs[0].stop_reason
