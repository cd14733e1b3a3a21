"""Stop strings: the same cut for any pieces, nothing leaked, nothing held for longer than it must be."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.stop import MAX_STOP_CHARACTERS, MAX_STOPS, StopMatcher, StopSet
from shared.errors import InvalidRequest

AB = st.text(alphabet="ab😀", max_size=30)
STOPS = st.lists(st.text(alphabet="ab😀", min_size=1, max_size=5), max_size=6)


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """What each piece lets out, the flush last; and the stop that was met."""
    matcher = StopMatcher(StopSet(stops), include=include)
    emitted = [matcher.push(piece) for piece in pieces]
    return [*emitted, matcher.flush()], matcher.matched


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """The cut of a whole text: the stop that begins first; of those that begin together, the shortest."""
    found = sorted((text.find(stop), len(stop), stop) for stop in stops if stop in text)
    return (text[: found[0][0]], found[0][2]) if found else (text, None)


@settings(deadline=None, max_examples=500)
@given(text=AB, stops=STOPS, cuts=st.lists(st.integers(0, 30)), include=st.booleans())
def test_any_pieces_give_the_cut_of_the_whole_text(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    """However the text is split, what comes out and what matched is the whole-text answer."""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    expected, met = naive(stops, text)

    emitted, matched = run(stops, pieces, include=include)

    assert (expected + (met or "" if include else ""), met) == ("".join(emitted), matched)


@settings(deadline=None, max_examples=300)
@given(text=AB, stops=STOPS)
def test_held_text_is_always_the_beginning_of_a_stop(text: str, stops: list[str]) -> None:
    """Until a stop is met, what is held back begins some stop; everything else is out already."""
    matcher = StopMatcher(StopSet(stops))
    emitted = ""
    for end, character in enumerate(text, start=1):
        emitted += matcher.push(character)
        if naive(stops, text[:end])[1] is not None:
            break
        held = text[len(emitted) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_every_substring_as_stop() -> None:
    """Each substring of length 2 to 6 of an answer cuts it as `text.split(stop)[0]` does."""
    answer = "Paris is the capital of France.\n\nIt is on the Seine — 你好 😀."
    for length in range(2, 7):
        for begin in range(len(answer) - length + 1):
            stop = answer[begin : begin + length]
            assert answer.split(stop)[0] == "".join(run([stop], list(answer))[0])


def test_a_long_stop_does_not_delay_unrelated_text() -> None:
    """Text that cannot begin the stop leaves at once, however long the stop is."""
    stop = "this stop text is sixty characters long and it never appears"

    assert ["Hello", " w", "orld", ""] == run([stop], ["Hello", " w", "orld"])[0]


def test_a_false_start_is_let_go_as_soon_as_it_is_one() -> None:
    """Held text leaves with the piece that shows it to be no stop."""
    assert (["a", "", "", "beta gax", ""], None) == run(["beta gam"], ["a", "beta", " ga", "x"])


def test_the_stop_that_begins_first_wins() -> None:
    """A stop inside a longer one waits for the longer one, and applies when that does not come."""
    assert (["", "", ""], "abcd") == run(["abcd", "bc"], ["abc", "d"])
    assert (["", "a", ""], "bc") == run(["abcd", "bc"], ["abc", "x"])
    assert (["", "a"], "bc") == run(["abcd", "bc"], ["abc"])


def test_nothing_comes_after_a_match() -> None:
    """Pieces after the stop are dropped."""
    assert (["a", "", "", ""], "\n\n") == run(["\n\n"], ["a\n", "\nb", "c"])


def test_empty_stops_are_ignored() -> None:
    """An empty stop string never matches."""
    assert (["abc", ""], None) == run(["", ""], ["abc"])
    assert not StopSet([""])


def test_choices_share_one_set() -> None:
    """Matchers of one set do not see each other's text."""
    stops = StopSet(["ab"])
    one, two = StopMatcher(stops), StopMatcher(stops)

    assert ("", "b") == (one.push("a"), two.push("b"))
    assert ("", "ab") == (one.push("b"), one.matched)


@pytest.mark.parametrize(
    "stops", [[str(i) for i in range(MAX_STOPS + 1)], ["x" * (MAX_STOP_CHARACTERS + 1)]], ids=["many", "long"]
)
def test_too_many_stops_are_refused(stops: list[str]) -> None:
    """Number and length of stops are bounded, and the error names the field."""
    with pytest.raises(InvalidRequest) as caught:
        StopSet(stops)
    assert "stop" == caught.value.param


class CountingStops(StopSet):
    """Counts automaton steps, those that build it included."""

    steps = 0

    def step(self, state: int, character: str) -> int:
        """One step, counted."""
        self.steps += 1
        return super().step(state, character)


def test_cost_does_not_grow_with_held_text() -> None:
    """A text that is one long near miss of the longest stop costs one step a character."""
    stops = CountingStops(["a" * (MAX_STOP_CHARACTERS - 1) + "b"])
    built = stops.steps
    matcher = StopMatcher(stops)
    emitted = "".join(matcher.push("a") for _ in range(20_000)) + matcher.flush()

    assert ("a" * 20_000, 20_000) == (emitted, stops.steps - built)
