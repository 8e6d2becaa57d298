"""Each sequence of a request has its own text and its own end; the request's one terminal is the last of these."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from repertory.actors.text.detokenizer_core import DetokenizerCore
from repertory.protocol.errors import Problem
from repertory.protocol.ids import RequestId
from repertory.protocol.messages import (
    ALL_SEQUENCES,
    Abort,
    Open,
    Refused,
    SequenceEnd,
    TextDelta,
    TokenLogprobs,
    TokensSampled,
)
from repertory.protocol.sampling import FinishReason, SamplingParams

BR, OWN_F, OX_JUMPS, OVER, OWN_FOX, NEW_LINE, A, B, END = range(9)
NO_TOKEN = -1
ONE, TWO = RequestId(1), RequestId(2)
BROKEN = Problem("RequestFailedError", "logits are not finite")


@pytest.fixture
def core(quick_brown: Tokenizer) -> DetokenizerCore:
    return DetokenizerCore(quick_brown)


def opening(request_id: RequestId, n: int, **params: object) -> Open:
    return Open(request_id, [], SamplingParams(n=n, **params), 5, 0, 10.0, 11.0)  # type: ignore[arg-type]


def sampled(
    *tokens: tuple[int, int], opened: list[Open] | None = None, ended: list[SequenceEnd] | None = None
) -> TokensSampled:
    """(index, token) of request `ONE`."""
    indices = [index for index, _ in tokens]
    return TokensSampled([ONE] * len(tokens), [token for _, token in tokens], 12.0, opened or [], ended or [], indices=indices)


def brief(deltas: list[TextDelta]) -> list[tuple[int, str, FinishReason | None, int]]:
    return [(delta.index, delta.text, delta.finish_reason, delta.num_left) for delta in deltas]


def test_texts_are_kept_apart_and_the_metrics_come_with_the_first_delta_and_each_end(core: DetokenizerCore) -> None:
    deltas, _ = core.on_tokens(sampled((0, BR), (1, A), opened=[opening(ONE, 2)]))
    assert brief(deltas) == [(0, "The quick br", None, 0), (1, "a", None, 0)]
    assert [delta.metrics is not None for delta in deltas] == [True, False]
    deltas, _ = core.on_tokens(sampled((0, OWN_F), (1, B), ended=[SequenceEnd(ONE, "length", index=1)]))
    assert brief(deltas) == [(0, "own f", None, 0), (1, "b", "length", 1)]
    assert [delta.metrics is not None for delta in deltas] == [False, True]
    assert [delta.is_terminal for delta in deltas] == [False, False]
    deltas, _ = core.on_tokens(sampled((0, OVER), ended=[SequenceEnd(ONE, "stop", index=0)]))
    assert [(delta.index, delta.is_terminal) for delta in deltas] == [(0, True)]
    assert deltas[0].metrics is not None and deltas[0].metrics.finished == 12.0
    assert len(core) == 0


def test_a_stop_string_ends_only_the_sequence_that_says_it(core: DetokenizerCore) -> None:
    core.on_tokens(sampled((0, OWN_F), (1, OWN_F), (2, A), opened=[opening(ONE, 3, stop="own fox")]))
    deltas, aborts = core.on_tokens(sampled((0, A), (1, OX_JUMPS), (2, B)))
    assert brief(deltas) == [(0, "own fa", None, 0), (1, "", "stop", 2), (2, "b", None, 0)]
    assert aborts == [Abort(ONE, "stop", 1)]
    deltas, aborts = core.on_tokens(sampled((1, OVER), (2, OWN_FOX), ended=[SequenceEnd(ONE, "stop", index=1)]))
    assert brief(deltas) == [(2, "", "stop", 1)]
    assert aborts == [Abort(ONE, "stop", 2)]


def test_text_that_raises_ends_its_own_sequence_only(core: DetokenizerCore) -> None:
    deltas, aborts = core.on_tokens(sampled((0, NO_TOKEN), (1, A), opened=[opening(ONE, 2)]))
    assert brief(deltas) == [(0, "", "error", 1), (1, "a", None, 0)]
    assert aborts == [Abort(ONE, "error", 0)]


@pytest.mark.parametrize("problem", [None, BROKEN])
def test_the_end_of_the_request_is_that_of_all_who_have_not_ended(core: DetokenizerCore, problem: Problem | None) -> None:
    core.on_tokens(sampled((0, OWN_F), (1, A), opened=[opening(ONE, 4, stop="own fox")]))
    core.on_tokens(sampled((1, B), ended=[SequenceEnd(ONE, "length", index=1)]))
    reason: FinishReason = "abort" if problem is None else "error"
    end = SequenceEnd(ONE, reason, problem=problem, index=ALL_SEQUENCES)
    deltas, aborts = core.on_tokens(sampled((3, BR), ended=[end]))
    assert sorted(brief(deltas)) == sorted([(3, "The quick br", reason, 2), (0, "own f", reason, 1), (2, "", reason, 0)])
    assert [delta.is_terminal for delta in deltas] == [False, False, True]
    assert (aborts, len(core)) == ([], 0)
    assert core.on_tokens(sampled((0, A), ended=[end])) == ([], [])


def test_the_end_of_a_request_that_never_opened_is_one_terminal(core: DetokenizerCore) -> None:
    deltas, _ = core.on_tokens(sampled(ended=[SequenceEnd(ONE, "abort", index=ALL_SEQUENCES)]))
    assert brief(deltas) == [(0, "", "abort", 0)]


def test_a_refusal_of_an_open_request_ends_each_with_what_it_held(core: DetokenizerCore) -> None:
    core.on_tokens(sampled((0, OWN_F), (1, A), opened=[opening(ONE, 2, stop="own fox")]))
    assert brief(core.on_refused(Refused(ONE, BROKEN))) == [(0, "own f", "error", 1), (1, "", "error", 0)]
    assert core.on_refused(Refused(ONE, BROKEN)) == []


def test_a_core_that_takes_over_leaves_out_what_had_ended_before(quick_brown: Tokenizer) -> None:
    core = DetokenizerCore(quick_brown, awaited={ONE: [1]})
    ended = [SequenceEnd(ONE, "length", index=1), SequenceEnd(ONE, "length", index=0)]
    assert core.on_tokens(sampled(ended=ended)) == ([], []), "it waits for the opening"
    deltas, _ = core.on_tokens(sampled((0, A), (1, B), opened=[opening(ONE, 2)], ended=ended))
    assert brief(deltas) == [(0, "a", "length", 0)]
    assert deltas[0].is_terminal


def test_logprobs_go_with_their_tokens_and_get_their_texts(core: DetokenizerCore) -> None:
    message = TokensSampled(
        [ONE, TWO, ONE, ONE], [A, B, OWN_FOX, OVER], 12.0, [opening(ONE, 1, stop="own fox", logprobs=1), opening(TWO, 1)],
        logprobs=[TokenLogprobs([A, B], [-0.5, -0.7], 1), None, TokenLogprobs([OWN_FOX, 99], [-1.0, -0.1], 2),
                  TokenLogprobs([OVER, A], [-1.0, -0.1], 2)],
    )  # fmt: skip
    first, second = core.on_tokens(message)[0]
    assert first.token_ids == [A, OWN_FOX]
    assert [details.texts for details in first.logprobs] == [["a", "b"], ["own fox", ""]]
    assert second.logprobs == []
