"""One terminal a request, whatever happens and in whatever order; one request's failure is its own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from repertory.actors.text.detokenizer_core import DetokenizerCore
from repertory.protocol.errors import Problem
from repertory.protocol.ids import RequestId
from repertory.protocol.messages import Abort, Metrics, Open, Refused, SequenceEnd, TextDelta, TokensSampled
from repertory.protocol.sampling import SamplingParams
from repertory.tests.text import small_tokenizers

BR, OWN_F, OX_JUMPS, OVER, OWN_FOX, NEW_LINE, A, B, END = range(9)
NO_TOKEN = -1
"""An id that makes the tokenizer raise."""
ONE, TWO, THREE = RequestId(1), RequestId(2), RequestId(3)
BROKEN = Problem("RequestFailedError", "logits are not finite")
TOKENIZER = small_tokenizers.whole_pieces("The quick br", "own f", "ox jumps", " over", "own fox", "\n", "a", "b")


@pytest.fixture
def core(quick_brown: Tokenizer) -> DetokenizerCore:
    return DetokenizerCore(quick_brown)


def opening(request_id: RequestId, *, cached: int = 0, tail: list[int] | None = None, **params: object) -> Open:
    return Open(request_id, tail or [], SamplingParams(**params), 5, cached, 10.0, 11.0)  # type: ignore[arg-type]


def sampled(
    *tokens: tuple[RequestId, int], at: float = 12.0, opened: list[Open] | None = None, ended: list[SequenceEnd] | None = None
) -> TokensSampled:
    return TokensSampled([r for r, _ in tokens], [t for _, t in tokens], at, opened or [], ended or [])


def test_a_request_lives_from_its_open_to_its_terminal(core: DetokenizerCore) -> None:
    deltas, aborts = core.on_tokens(sampled((ONE, BR), opened=[opening(ONE, cached=4)]))
    first = Metrics(arrival=10.0, queued=10.0, first_scheduled=11.0, first_token=12.0, last_token=12.0)
    assert deltas == [TextDelta(ONE, "The quick br", [BR], num_cached_tokens=4, metrics=first)]
    assert core.on_tokens(sampled((ONE, OWN_F), at=13.0))[0] == [TextDelta(ONE, "own f", [OWN_F], num_cached_tokens=4)]
    assert len(core) == 1
    end = SequenceEnd(ONE, "length", num_preemptions=2)
    deltas, more = core.on_tokens(sampled((ONE, OX_JUMPS), at=14.0, ended=[end]))
    last = Metrics(10.0, 10.0, 11.0, first_token=12.0, last_token=14.0, finished=14.0, num_preemptions=2)
    assert deltas == [TextDelta(ONE, "ox jumps", [OX_JUMPS], "length", None, None, 4, last)]
    assert (aborts, more, len(core)) == ([], [], 0)


def test_a_stop_string_ends_the_request_at_once_and_aborts_it_in_the_scheduler(core: DetokenizerCore) -> None:
    core.on_tokens(sampled((ONE, BR), (ONE, OWN_F), opened=[opening(ONE, stop="own fox")]))
    deltas, aborts = core.on_tokens(sampled((ONE, OX_JUMPS), (ONE, OVER)))
    assert [(d.text, d.token_ids, d.finish_reason, d.stop_reason) for d in deltas] == [("", [OX_JUMPS], "stop", "own fox")]
    assert aborts == [Abort(ONE, "stop")]
    assert len(core) == 0


def test_what_arrives_after_a_stop_string_is_dropped(core: DetokenizerCore) -> None:
    core.on_tokens(sampled((ONE, OWN_FOX), opened=[opening(ONE, stop="own fox")]))
    assert core.on_tokens(sampled((ONE, OVER))) == ([], [])
    assert core.on_tokens(sampled((ONE, OVER), ended=[SequenceEnd(ONE, "length")])) == ([], [])
    assert core.on_tokens(sampled(ended=[SequenceEnd(ONE, "abort")])) == ([], [])
    assert core.on_tokens(sampled(opened=[opening(ONE)])) == ([], [])
    assert core.on_refused(Refused(ONE, BROKEN)) == []
    assert len(core) == 0


@pytest.mark.parametrize("reason", ["length", "stop", "abort", "error"])
def test_a_stop_string_complete_by_the_schedulers_end_wins_and_needs_no_abort(core: DetokenizerCore, reason: str) -> None:
    end = SequenceEnd(ONE, reason, problem=BROKEN if reason == "error" else None)  # type: ignore[arg-type]
    opened = [opening(ONE, stop="own fox")]
    deltas, aborts = core.on_tokens(sampled((ONE, OWN_FOX), (ONE, END), opened=opened, ended=[end]))
    assert [(d.text, d.token_ids, d.finish_reason, d.stop_reason, d.problem) for d in deltas] == [
        ("", [OWN_FOX], "stop", "own fox", None)
    ]
    assert aborts == []


def test_a_stop_token_counts_and_shows_only_as_the_reason(core: DetokenizerCore) -> None:
    end = SequenceEnd(ONE, "stop", stop_token_id=OVER)
    opened = [opening(ONE)]
    deltas, _ = core.on_tokens(sampled((ONE, A), (ONE, OVER), opened=opened, ended=[end]))
    assert [(d.text, d.token_ids, d.finish_reason, d.stop_reason) for d in deltas] == [("a", [A, OVER], "stop", OVER)]


def test_an_end_of_sequence_token_is_kept_out_of_the_text_even_where_special_tokens_show(core: DetokenizerCore) -> None:
    opened = [opening(ONE, skip_special_tokens=False)]
    deltas, _ = core.on_tokens(sampled((ONE, A), (ONE, END), opened=opened, ended=[SequenceEnd(ONE, "stop")]))
    assert [(d.text, d.token_ids, d.stop_reason) for d in deltas] == [("a", [A, END], None)]


def test_a_held_tail_comes_with_an_end_that_brings_no_token(core: DetokenizerCore) -> None:
    core.on_tokens(sampled((ONE, OWN_F), opened=[opening(ONE, stop="own fox")]))
    deltas, _ = core.on_tokens(sampled(ended=[SequenceEnd(ONE, "abort")]))
    assert [(d.text, d.token_ids, d.finish_reason) for d in deltas] == [("own f", [], "abort")]


def test_an_end_with_an_error_carries_its_problem_and_the_text_so_far(core: DetokenizerCore) -> None:
    core.on_tokens(sampled((ONE, OWN_F), opened=[opening(ONE, stop="own fox")]))
    deltas, aborts = core.on_tokens(sampled(ended=[SequenceEnd(ONE, "error", problem=BROKEN)]))
    assert [(d.text, d.finish_reason, d.stop_reason, d.problem) for d in deltas] == [
        ("own f", "error", "logits are not finite", BROKEN)
    ]
    assert aborts == []


def test_tokens_of_several_requests_keep_their_order_in_one_delta_each(core: DetokenizerCore) -> None:
    opened = [opening(ONE), opening(TWO)]
    deltas, _ = core.on_tokens(sampled((ONE, A), (TWO, B), (ONE, B), (TWO, NEW_LINE), opened=opened))
    assert [(d.request_id, d.text, d.token_ids) for d in deltas] == [(ONE, "ab", [A, B]), (TWO, "b\n", [B, NEW_LINE])]


def test_an_id_without_text_still_counts(core: DetokenizerCore) -> None:
    deltas, _ = core.on_tokens(sampled((ONE, END), (ONE, END), opened=[opening(ONE)]))
    assert [(d.text, d.token_ids) for d in deltas] == [("", [END, END])]


def test_a_request_that_opens_and_ends_without_a_token_gets_its_terminal(core: DetokenizerCore) -> None:
    deltas, _ = core.on_tokens(sampled(opened=[opening(ONE)], ended=[SequenceEnd(ONE, "abort")]))
    assert [(d.text, d.finish_reason) for d in deltas] == [("", "abort")]
    assert deltas[0].metrics == Metrics(10.0, 10.0, 11.0, finished=12.0)


def test_tokens_of_a_request_that_never_opened_are_dropped(core: DetokenizerCore) -> None:
    assert core.on_tokens(sampled((ONE, A))) == ([], [])
    assert len(core) == 0


def test_a_second_open_changes_nothing(core: DetokenizerCore) -> None:
    core.on_tokens(sampled((ONE, OWN_F), opened=[opening(ONE, stop="own fox")]))
    deltas, _ = core.on_tokens(sampled((ONE, OX_JUMPS), opened=[opening(ONE)]))
    assert deltas[0].stop_reason == "own fox"


# ---- refusals -------------------------------------------------------------------------------------


def test_a_request_refused_before_it_opened_ends_with_its_problem_once(core: DetokenizerCore) -> None:
    problem = Problem("ValidationError", "prompt is empty", "prompt")
    assert core.on_refused(Refused(ONE, problem)) == [TextDelta(ONE, "", [], "error", "prompt is empty", problem)]
    assert core.on_refused(Refused(ONE, problem)) == []
    assert len(core) == 0


def test_a_request_aborted_while_it_waited_ends_with_abort(core: DetokenizerCore) -> None:
    assert core.on_refused(Refused(ONE)) == [TextDelta(ONE, "", [], "abort")]


def test_an_open_request_that_is_refused_gives_what_it_held(core: DetokenizerCore) -> None:
    core.on_tokens(sampled((ONE, OWN_F), opened=[opening(ONE, stop="own fox")]))
    (delta,) = core.on_refused(Refused(ONE, BROKEN))
    assert (delta.text, delta.finish_reason, delta.problem) == ("own f", "error", BROKEN)
    assert core.on_tokens(sampled((ONE, OX_JUMPS), ended=[SequenceEnd(ONE, "length")])) == ([], [])
    assert len(core) == 0


# ---- failures --------------------------------------------------------------------------------------


def test_a_token_the_tokenizer_raises_on_ends_its_own_request_only(core: DetokenizerCore) -> None:
    opened = [opening(ONE), opening(TWO), opening(THREE)]
    deltas, aborts = core.on_tokens(sampled((ONE, A), (TWO, NO_TOKEN), (THREE, B), opened=opened))
    assert [(d.request_id, d.text, d.finish_reason) for d in deltas] == [
        (ONE, "a", None),
        (TWO, "", "error"),
        (THREE, "b", None),
    ]
    assert deltas[1].token_ids == [NO_TOKEN]
    assert deltas[1].problem is not None
    assert deltas[1].problem.kind == "RequestFailedError"
    assert deltas[1].stop_reason == deltas[1].problem.message
    assert aborts == [Abort(TWO, "error")]
    assert len(core) == 2


def test_an_open_that_raises_ends_its_own_request_only(core: DetokenizerCore) -> None:
    opened = [opening(ONE, tail=[NO_TOKEN]), opening(TWO)]
    deltas, aborts = core.on_tokens(sampled((ONE, A), (TWO, B), opened=opened))
    assert [(d.request_id, d.finish_reason) for d in deltas] == [(ONE, "error"), (TWO, None)]
    assert aborts == [Abort(ONE, "error")]
    assert len(core) == 1


def test_a_failure_together_with_the_schedulers_end_gives_one_terminal_and_no_abort(core: DetokenizerCore) -> None:
    end = SequenceEnd(ONE, "length")
    deltas, aborts = core.on_tokens(sampled((ONE, NO_TOKEN), opened=[opening(ONE)], ended=[end]))
    assert ([d.finish_reason for d in deltas], aborts, len(core)) == (["error"], [], 0)


REQUESTS = [ONE, TWO, THREE]
EVENTS = st.one_of(
    st.tuples(st.just("open"), st.sampled_from(REQUESTS), st.sampled_from([None, "own fox", "ab", "\n"])),
    st.tuples(st.just("token"), st.sampled_from(REQUESTS), st.sampled_from([*range(9), 99, NO_TOKEN])),
    st.tuples(st.just("end"), st.sampled_from(REQUESTS), st.sampled_from(["stop", "length", "abort", "error"])),
    st.tuples(st.just("refuse"), st.sampled_from(REQUESTS), st.sampled_from([None, BROKEN])),
    st.tuples(st.just("send"), st.just(ONE), st.none()),
)


@given(events=st.lists(EVENTS, max_size=40))
@settings(deadline=None, max_examples=300)
def test_any_order_of_events_gives_each_request_one_terminal_and_nothing_after_it(events: list[tuple]) -> None:  # type: ignore[type-arg]
    core = DetokenizerCore(TOKENIZER)
    out: list[TextDelta] = []
    tokens: list[tuple[RequestId, int]] = []
    opened: list[Open] = []
    ended: list[SequenceEnd] = []
    known: set[RequestId] = set()
    for kind, request_id, value in [*events, ("send", ONE, None)]:
        if kind == "open":
            opened.append(opening(request_id, stop=value))
            known.add(request_id)
        elif kind == "token":
            tokens.append((request_id, value))
        elif kind == "end":
            ended.append(SequenceEnd(request_id, value, problem=BROKEN if value == "error" else None))
        elif kind == "refuse":
            out += core.on_refused(Refused(request_id, value))
            known.add(request_id)
        else:
            deltas, aborts = core.on_tokens(sampled(*tokens, opened=opened, ended=ended))
            out += deltas
            ends = {end.request_id for end in ended}
            stopped = {d.request_id for d in deltas if d.finish_reason is not None} - ends
            assert {abort.request_id for abort in aborts} == stopped
            tokens, opened, ended = [], [], []
    for request_id in REQUESTS:
        out += core.on_refused(Refused(request_id))
        reasons = [delta.finish_reason for delta in out if delta.request_id == request_id]
        assert [reason is not None for reason in reasons] == [False] * (len(reasons) - 1) + [True]
    assert len(core) == 0
