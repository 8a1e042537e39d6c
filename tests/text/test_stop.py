"""Stop strings, against str.find."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.text.stop import StopChecker, StopStrings

LETTERS = st.text("ab<", max_size=30)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By str.find: the text before the stop string that is complete first, the longest of those, and that string."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, minus_length, stop = min(ends)
    return text[: end + minus_length], stop


def run(checker: StopChecker, chunks: list[str]) -> str:
    out = []
    for chunk in chunks:
        text, stopped = checker.push(chunk)
        out.append(text)
        if stopped:
            return "".join(out)
    return "".join([*out, checker.flush()])


def cut(text: str, at: list[int]) -> list[str]:
    edges = [0, *sorted(min(i, len(text)) for i in at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=200, deadline=None)
@given(LETTERS, STOPS, st.lists(st.integers(0, 30), max_size=12))
def test_text_ends_at_the_first_complete_stop_however_it_is_cut(text: str, stops: list[str], at: list[int]) -> None:
    """TGI#1254, llama.cpp#9867: nothing of a stop string leaks, and nothing that was held back is lost."""
    before, stop = expected(text, stops)
    for chunks in (cut(text, at), [text], list(text)):
        checker = StopChecker(StopStrings(stops))
        assert run(checker, chunks) == before
        assert (checker.stopped, checker.matched) == (stop is not None, stop)
        including = StopChecker(StopStrings(stops), include_stop=True)
        assert run(including, chunks) == before + (stop or "")


def test_every_short_text_ends_right_with_every_pair_of_short_stops() -> None:
    """Exhaustively, for stops that overlap themselves and each other."""
    stops = ["".join(letters) for n in (1, 2, 3) for letters in itertools.product("ab", repeat=n)]
    texts = ["".join(letters) for letters in itertools.product("ab", repeat=6)]
    for pair in itertools.combinations(stops, 2):
        for text in texts:
            checker = StopChecker(StopStrings(pair))
            assert run(checker, [text]) == expected(text, list(pair))[0], (text, pair)


@settings(max_examples=150, deadline=None)
@given(LETTERS, STOPS)
def test_what_is_held_back_is_the_longest_end_that_begins_a_stop(text: str, stops: list[str]) -> None:
    """vllm#11089: the text does not lag by the length of the longest stop string."""
    if any(stop in text for stop in stops):
        return
    begins = [end for end in range(len(text) + 1) if any(stop.startswith(text[end:]) for stop in stops) or end == len(text)]
    emitted, stopped = StopChecker(StopStrings(stops)).push(text)
    assert (emitted, stopped) == (text[: min(begins)], False)


def test_a_stop_split_over_two_chunks_does_not_leak() -> None:
    """TGI#1254."""
    checker = StopChecker(StopStrings(["own fox"]))
    assert checker.push("The quick br") == ("The quick br", False)
    assert checker.push("own") == ("", False)
    assert checker.push(" fox jumps") == ("", True)
    assert checker.matched == "own fox"


def test_held_back_text_comes_out_when_the_answer_ends() -> None:
    """llama.cpp#9867."""
    checker = StopChecker(StopStrings(["?\n"]))
    assert checker.push("How are you?") == ("How are you", False)
    assert checker.flush() == "?"
    assert checker.flush() == ""


def test_a_long_stop_string_holds_back_nothing_of_other_text() -> None:
    """vllm#11089."""
    checker = StopChecker(StopStrings(["x" * 200]))
    assert checker.push("no match here") == ("no match here", False)
    assert checker.push("ends in x") == ("ends in ", False)
    assert checker.push(" and goes on") == ("x and goes on", False)


def test_a_false_start_is_released_up_to_the_next_possible_start() -> None:
    checker = StopChecker(StopStrings(["aab"]))
    assert checker.push("aa") == ("", False)
    assert checker.push("a") == ("a", False)
    assert checker.push("b") == ("", True)


def test_text_after_the_stop_is_dropped() -> None:
    checker = StopChecker(StopStrings(["STOP"]), include_stop=True)
    assert checker.push("go STOP and more") == ("go STOP", True)
    assert checker.push("even more") == ("", True)
    assert checker.flush() == ""


@pytest.mark.parametrize("stop", ["<|im_end|>", "👩‍👧", "\x00", "é"])
def test_any_text_works_as_a_stop(stop: str) -> None:
    """dynamo#3014: the text of a special token is a stop string like any other."""
    assert StopChecker(StopStrings([stop])).push(f"before{stop}after") == ("before", True)


def test_without_stops_everything_passes_at_once() -> None:
    checker = StopChecker(StopStrings([]))
    assert checker.push("anything") == ("anything", False)
    assert checker.flush() == ""


def test_a_stop_string_that_comes_too_early_is_text_and_one_that_ends_in_time_is_found() -> None:
    """vllm#21987."""
    checker = StopChecker(StopStrings(["stop", "op!"]))
    assert checker.push("a stop b", may_end=False) == ("a stop b", False)
    assert checker.push(" sto", may_end=False) == (" ", False)
    assert checker.push("p", may_end=False) == ("", False)
    assert checker.push("!") == ("st", True)
    assert checker.matched == "op!"
