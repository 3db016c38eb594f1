"""Stop strings: the same result however the text is cut, and nothing of a stop string ever let out."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from frontend.output import StopStrings

TEXT = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def cut(text: str, borders: list[int]) -> list[str]:
    points = sorted({min(border, len(text)) for border in borders} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(points)]


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character, by definition."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=8))
@example("aabab", ["abab", "b"], [2, 3])
@example("aaab", ["aab"], [1, 2, 3])
def test_result_does_not_depend_on_the_cuts(text: str, stops: list[str], borders: list[int]) -> None:
    checker, out, matched = StopStrings(stops), "", None
    for piece in cut(text, borders):
        shown, matched = checker.feed(piece)
        out += shown
        if matched is not None:
            break
        # What is out stays right whatever comes: no stop string can begin in it.
        assert not any(
            out.endswith(stop[:size]) and (text + "\0").startswith(stop, len(out) - size)
            for stop in stops
            for size in range(1, len(stop) + 1)
        )
    if matched is None:
        out += checker.flush()
    assert (out, matched) == reference(text, stops)


@given(TEXT)
def test_without_stop_strings_nothing_is_held_back(text: str) -> None:
    assert StopStrings([]).feed(text) == (text, None)


def test_no_more_is_held_back_than_could_become_a_stop_string() -> None:
    checker = StopStrings(["\n\nUser:"])
    assert checker.feed("hello\n") == ("hello", None)
    assert checker.feed("\nUs") == ("", None)
    assert checker.feed("ually") == ("\n\nUsually", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])
