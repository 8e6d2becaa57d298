"""A device is opened for the largest step that the scheduler may send, which is not the token budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from repertory.gpu.cuda.stepping import StepRunner
from repertory.protocol.messages import StepDone
from repertory.tests.gpu.stepping import Stepper
from repertory.tests.gpu_cuda.opened import open_late


def step_of(model_dir: Path, counts: dict[int, int], **settings: object) -> StepDone:
    """The answer to a step of so many tokens of each of some new sequences."""
    executor, _ = open_late(model_dir, max_num_seqs=4, **settings)
    try:
        stepper = Stepper(executor)
        for seq_id, count in counts.items():
            stepper.add(seq_id, list(range(3, 3 + count)), room=0)
        return stepper.step(counts)
    finally:
        executor.close()


def test_without_chunks_the_longest_prompt_runs_whole_beside_decodes(tiny_model: Path) -> None:
    counts = {1: 100, 2: 1, 3: 1, 4: 1}
    done = step_of(tiny_model, counts, enable_chunked_prefill=False, max_num_batched_tokens=16, max_model_len=100)
    assert done.seq_ids == [1, 2, 3, 4]


def test_decodes_have_their_tokens_whatever_the_budget(tiny_model: Path) -> None:
    done = step_of(tiny_model, dict.fromkeys((1, 2, 3, 4), 1), max_num_batched_tokens=1)
    assert done.seq_ids == [1, 2, 3, 4]


def test_with_chunks_a_step_beyond_the_budget_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="a step of 17 tokens; this device was opened for 16"):
        step_of(tiny_model, {1: 17}, max_num_batched_tokens=16)


def test_a_step_of_more_rows_than_may_run_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="a step of 5 rows; this device was opened for 4"):
        step_of(tiny_model, dict.fromkeys((1, 2, 3, 4, 5), 1))


def test_the_step_that_is_measured_has_all_the_tokens_that_a_step_may_have(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, int]] = []
    really = StepRunner.launch_hidden

    def launch_hidden(self: StepRunner, num_tokens: int, inputs: Any) -> Any:
        sizes.append((num_tokens, self.limits.num_tokens))
        return really(self, num_tokens, inputs)

    monkeypatch.setattr(StepRunner, "launch_hidden", launch_hidden)
    open_late(tiny_model, max_num_seqs=5, max_num_batched_tokens=600, max_model_len=128)
    assert sizes[0] == (600, 600)
