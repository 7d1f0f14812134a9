"""Stop strings: found wherever the text is cut, and never shown in part."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twostroke.engine.stop_strings import StopStrings

LETTERS = "ab\n"  # few letters: many overlaps
WORDS = st.text(LETTERS, min_size=1, max_size=5)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Grow the text letter by letter until it ends in a stop string; the longest of those counts."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, borders: list[int]) -> list[str]:
    points = sorted({0, len(text), *(border % (len(text) + 1) for border in borders)})
    return [text[start:end] for start, end in pairwise(points)]


@given(
    text=st.text(LETTERS, max_size=24),
    stops=st.lists(WORDS, min_size=1, max_size=4),
    borders=st.lists(st.integers(0, 24)),
    include=st.booleans(),
)
def test_pieces_give_what_the_whole_text_gives(text: str, stops: list[str], borders: list[int], include: bool) -> None:
    shown, matched = naive(text, stops, include)
    search = StopStrings(stops, include_in_output=include)
    seen = ""
    for piece in cut(text, borders):
        seen += search.push(piece)
        assert shown.startswith(seen)
        if search.matched is not None:
            break
    if search.matched is None:
        seen += search.flush()
    assert (seen, search.matched) == (shown, matched)


@given(text=st.text(LETTERS, max_size=24), stops=st.lists(WORDS, min_size=1, max_size=4))
def test_no_more_is_held_back_than_could_become_a_stop_string(text: str, stops: list[str]) -> None:
    search = StopStrings(stops)
    seen = ""
    for end, letter in enumerate(text, 1):
        seen += search.push(letter)
        if search.matched is not None:
            return
        held = text[len(seen) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        pytest.param(["</s>"], ["Hi <", "/", "s", ">x"], "Hi ", "</s>", id="over_four_tokens"),
        pytest.param(["aab"], ["a", "a", "a", "b"], "a", "aab", id="overlapping_prefix"),
        pytest.param(["abcd", "bc"], ["a", "b", "c"], "a", "bc", id="shorter_one_completes_first"),
        pytest.param(["bc", "abc"], ["ab", "c"], "", "abc", id="longest_of_those_that_end_together"),
        pytest.param(["stop"], ["no s", "to", "o"], "no stoo", None, id="false_alarm"),
        pytest.param([], ["a", "b"], "ab", None, id="no_stops"),
    ],
)
def test_cases(stops: list[str], pieces: list[str], shown: str, matched: str | None) -> None:
    search = StopStrings(stops)
    seen = "".join(search.push(piece) for piece in pieces)
    if search.matched is None:
        seen += search.flush()
    assert (seen, search.matched) == (shown, matched)


def test_include_in_output_ends_with_the_stop_string() -> None:
    search = StopStrings(["END"], include_in_output=True)
    assert search.push("the E") == "the "
    assert search.push("ND of it") == "END"
    assert search.matched == "END"
