"""Stop strings: the earliest completed match, nothing released that could be part of one, nothing after it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repertory.actors.text.stops import StopStrings


def released(stops: list[str], deltas: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    machine = StopStrings(stops, include=include)
    texts = [machine.feed(delta) for delta in deltas]
    return [*texts, machine.flush()], machine.matched


QUICK = ["The quick br", "own f", "ox jumps", " over"]


def test_a_stop_string_across_three_pieces_is_cut_out() -> None:
    assert released(["own fox"], QUICK) == (["The quick br", "", "", "", ""], "own fox")


def test_an_included_stop_string_ends_the_text_and_what_follows_it_in_its_piece_does_not_show() -> None:
    texts, matched = released(["own fox"], QUICK, include=True)
    assert (texts, matched) == (["The quick br", "", "own fox", "", ""], "own fox")


def test_a_held_tail_is_released_at_the_end_when_nothing_matched() -> None:
    assert released(["own fox"], QUICK[:2]) == (["The quick br", "", "own f"], None)


def test_a_held_tail_is_released_unchanged_as_soon_as_it_can_be_no_stop() -> None:
    assert released(["own fox"], ["The br", "own f", "ish", "."]) == (["The br", "", "own fish", ".", ""], None)


def test_only_the_tail_that_could_still_match_is_held() -> None:
    machine = StopStrings(["abcab"])
    assert machine.feed("xxabca") == "xx"
    assert machine.feed("x") == "abcax"
    assert machine.feed("abcabc") == ""
    assert machine.matched == "abcab"


def test_overlapping_prefixes_are_not_missed() -> None:
    assert released(["aab"], list("aaab")) == (["", "", "a", "", ""], "aab")
    assert released(["aabaaac"], ["aabaaabaaac"]) == (["aaba", ""], "aabaaac")
    assert released(["ababac"], list("abababac")) == (["", "", "", "", "", "ab", "", "", ""], "ababac")


def test_the_match_that_completes_first_wins_even_if_another_began_before() -> None:
    assert released(["abcdef", "cd"], ["xabcdef"]) == (["xab", ""], "cd")


def test_of_two_matches_that_complete_together_the_one_that_starts_first_wins() -> None:
    for stops in (["cd", "abcd"], ["abcd", "cd"]):
        assert released(stops, ["xab", "cd"]) == (["x", "", ""], "abcd")


def test_the_first_of_several_matches_in_one_piece_wins() -> None:
    assert released(["\n"], ["one\ntwo\n"]) == (["one", ""], "\n")


def test_text_that_came_before_arming_can_be_no_part_of_a_match() -> None:
    machine = StopStrings(["ab"])
    assert machine.feed("abab", armed=False) == "abab"
    assert machine.feed("a", armed=False) == "a"
    assert machine.feed("b") == "b"
    assert machine.feed("xab") == "x"
    assert machine.matched == "ab"


def test_a_tail_held_before_disarming_is_released_in_its_place() -> None:
    machine = StopStrings(["ab"])
    assert [machine.feed("xa"), machine.feed("b", armed=False), machine.flush()] == ["x", "ab", ""]
    assert machine.matched is None


def test_a_match_begun_before_disarming_does_not_go_on_after_it() -> None:
    machine = StopStrings(["aa"])
    assert [machine.feed("a"), machine.feed("x", armed=False), machine.feed("a"), machine.flush()] == ["", "ax", "", "a"]
    assert machine.matched is None


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert released([], ["a", "", "b"]) == (["a", "", "b", ""], None)


def test_repeated_stop_strings_are_one() -> None:
    assert released(["b", "b"], ["abc"]) == (["a", ""], "b")


@pytest.mark.parametrize("include", [False, True])
def test_a_thousand_character_stop_costs_time_linear_in_the_output(include: bool) -> None:
    stops = ["a" * 1000 + chr(ord("b") + i) for i in range(8)]
    machine = StopStrings(stops, include=include)
    began = time.process_time()
    text = "".join(machine.feed("aaaa") for _ in range(2500))
    assert text + machine.flush() == "a" * 10_000
    assert time.process_time() - began < 5


def test_making_a_machine_for_the_most_and_longest_stops_costs_next_to_nothing() -> None:
    stops = [chr(0x4E00 + i) * 1024 for i in range(64)]
    began = time.process_time()
    machine = StopStrings(stops)
    for _ in range(100):
        machine.feed("some text, ")
    assert time.process_time() - began < 0.5


def expected(stops: list[str], text: str, *, include: bool) -> tuple[str, str | None]:
    """The rule in its plainest form: try every end, shortest first, and of those the longest stop."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def longest_open_tail(stops: list[str], text: str) -> int:
    return max((k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])), default=0)


@given(
    stops=st.lists(st.text("ab ", min_size=1, max_size=6) | st.text("ab", min_size=6, max_size=9), max_size=4),
    deltas=st.lists(st.text("ab ", max_size=7) | st.text("ab", max_size=7), max_size=12),
    include=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_any_split_of_any_text_gives_the_plain_rule_and_holds_no_more_than_it_must(
    stops: list[str], deltas: list[str], include: bool
) -> None:
    machine = StopStrings(stops, include=include)
    wanted, stop = expected(stops, "".join(deltas), include=include)
    read = given_out = ""
    for delta in deltas:
        read += delta
        given_out += machine.feed(delta)
        assert wanted.startswith(given_out)
        if machine.matched is None:
            assert given_out == read[: len(read) - longest_open_tail(stops, read)]
    given_out += machine.flush()
    assert (given_out, machine.matched) == (wanted, stop)
