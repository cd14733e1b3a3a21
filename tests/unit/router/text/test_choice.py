"""One choice's pipeline: text, stops, logprobs and counts agree with each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.choice import ChoiceText, Ending, Piece, TokenEntry, split_stops
from router.text.stop import StopSet
from router.text.tokenizer import TextTokenizer
from shared.wire import FinishReason, Logprobs, TokenOut


def tokens_of(ids: Sequence[int], last: FinishReason | None = "length") -> list[TokenOut]:
    """Worker tokens with logprobs; the last one carries the finish reason."""
    return [
        TokenOut(
            choice=0,
            token_id=token_id,
            logprobs=Logprobs(token=-float(position), top=[(token_id, -float(position))]),
            finish_reason=last if position == len(ids) - 1 else None,
        )
        for position, token_id in enumerate(ids)
    ]


def run(choice: ChoiceText, tokens: Sequence[TokenOut]) -> tuple[str, list[Piece], Ending | None]:
    """Push all; the joined text, the pieces and the finish reason."""
    pieces = [choice.push(token) for token in tokens]
    reasons = [piece.finish_reason for piece in pieces if piece.finish_reason]
    assert len(reasons) <= 1
    return "".join(piece.text for piece in pieces), pieces, reasons[0] if reasons else None


def test_text_ends_at_the_length_limit(tokenizer: TextTokenizer) -> None:
    """A "length" token has text; the count is the number of tokens."""
    ids = tokenizer.encode("The capital of France")
    choice = ChoiceText(tokenizer, [], StopSet())

    text, _, reason = run(choice, tokens_of(ids))

    assert ("The capital of France", "length", len(ids)) == (text, reason, choice.completion_tokens)
    assert (True, False) == (choice.finished, choice.stopped_early)


def test_the_end_token_is_counted_and_silent(tokenizer: TextTokenizer) -> None:
    """A "stop" token has neither text nor a logprob entry, and counts as one token."""
    ids = [*tokenizer.encode("Paris."), tokenizer.control_ids["<|im_end|>"]]
    choice = ChoiceText(tokenizer, [], StopSet())

    text, pieces, reason = run(choice, tokens_of(ids, "stop"))

    assert ("Paris.", "stop", len(ids)) == (text, reason, choice.completion_tokens)
    assert len(ids) - 1 == sum(len(piece.entries) for piece in pieces)


def test_an_end_token_that_is_ordinary_text_is_silent_too(tokenizer: TextTokenizer) -> None:
    """A client's own stop token does not show its text."""
    ids = tokenizer.encode("a b")

    assert "a" == run(ChoiceText(tokenizer, [], StopSet()), tokens_of(ids, "stop"))[0]


def test_every_substring_stop_cuts_alike(tokenizer: TextTokenizer) -> None:
    """Stops inside, across and at the start of tokens all cut as `split` does, and say "stop"."""
    answer = "Paris is the capital 你好 😀.\n\nIt is"
    tokens = tokens_of(tokenizer.encode(answer))
    for length in range(1, 7):
        for begin in range(len(answer) - length + 1):
            stop = answer[begin : begin + length]
            choice = ChoiceText(tokenizer, [], StopSet([stop]))
            text, pieces, reason = run(choice, tokens)
            assert (answer.split(stop)[0], "stop") == (text, reason)
            assert text == "".join(entry.text for piece in pieces for entry in piece.entries)
            assert choice.completion_tokens <= len(tokens)


def test_a_stop_string_says_that_later_tokens_are_dropped(tokenizer: TextTokenizer) -> None:
    """After a stop the worker's later tokens change nothing; its own last token needs no word."""
    tokens = tokens_of(tokenizer.encode("one, two, three"))
    early, late = ChoiceText(tokenizer, [], StopSet([","])), ChoiceText(tokenizer, [], StopSet(["ee"]))
    run(early, tokens)
    run(late, tokens)

    assert (True, False) == (early.stopped_early, late.stopped_early)
    assert early.completion_tokens < len(tokens)
    assert not early.push(tokens[-1])


def test_min_tokens_shields_the_first_tokens_from_stops(tokenizer: TextTokenizer) -> None:
    """A stop within the first min_tokens tokens is text; the next one stops."""
    ids = tokenizer.encode("1,2,3,4")
    choice = ChoiceText(tokenizer, [], StopSet([","]), min_tokens=2)

    assert ("1,2", "stop") == run(choice, tokens_of(ids))[::2]


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_logprobs_stay_beside_their_text(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    """Entries come in token order, never before their text, and their texts join to the answer's text."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=30))
    stops = data.draw(st.lists(st.text(alphabet="aeiou tn", min_size=1, max_size=3), max_size=3))
    choice = ChoiceText(tokenizer, [], StopSet(stops))
    emitted = ""
    entries: list[TokenEntry] = []
    for token in tokens_of(ids):
        piece = choice.push(token)
        emitted += piece.text
        entries += piece.entries
        assert all(entry.end <= len(emitted) for entry in piece.entries)
        assert not piece.entries or piece.text or piece.finish_reason

    assert emitted == "".join(entry.text for entry in entries)
    assert all(a.end == b.offset for a, b in pairwise(entries))
    assert [entry.token_id for entry in entries] == ids[: len(entries)]
    if not stops:
        assert len(entries) == choice.completion_tokens


def test_a_choice_may_end_without_text(tokenizer: TextTokenizer) -> None:
    """An end token first gives an empty text, "stop", and one counted token."""
    choice = ChoiceText(tokenizer, [], StopSet())
    end = tokenizer.control_ids["<|im_end|>"]
    piece = choice.push(TokenOut(choice=0, token_id=end, finish_reason="stop"))

    assert (Piece(finish_reason="stop", token_ids=(end,)), 1) == (piece, choice.completion_tokens)


def test_pieces_tell_every_token_id_once(tokenizer: TextTokenizer) -> None:
    """Ids of tokens whose text is held back come with the piece that gives the text out."""
    choice = ChoiceText(tokenizer, [], StopSet(["three!"]))
    ids = tokenizer.encode("one, three four")
    pieces = [choice.push(token) for token in tokens_of(ids, "length")]

    assert ids == [token for piece in pieces for token in piece.token_ids]


def test_an_abandoned_choice_gives_what_was_held(tokenizer: TextTokenizer) -> None:
    """Held text is not lost when the tokens end without a reason."""
    choice = ChoiceText(tokenizer, [], StopSet(["three!"]))
    text = run(choice, tokens_of(tokenizer.encode("one, three"), None))[0]

    assert ("one, ", "three") == (text, choice.abandon("length").text)
    assert not choice.abandon("length")


def test_the_stop_can_be_kept(tokenizer: TextTokenizer) -> None:
    """With include_stop the text ends with the stop string."""
    choice = ChoiceText(tokenizer, [], StopSet([", "]), include_stop=True)

    assert "one, " == run(choice, tokens_of(tokenizer.encode("one, two")))[0]


@pytest.mark.parametrize(
    ("stops", "ids"),
    [([], []), (["<|im_end|>", "x"], ["<|im_end|>"]), (["<tool_call>"], []), (["<|im_end|>\n"], [])],
)
def test_special_stops_become_stop_tokens(tokenizer: TextTokenizer, stops: list[str], ids: list[str]) -> None:
    """A stop that is exactly one special token is looked for as that token, and as text; others as text only."""
    stop_ids, texts = split_stops(stops, tokenizer)

    assert [tokenizer.control_ids[text] for text in ids] == list(stop_ids)
    assert tuple(stops) == texts.stops


def test_every_entry_counts_end_token_and_stop_tokens_too(tokenizer: TextTokenizer) -> None:
    """With `every_entry` there are as many entries as counted tokens, and they still join to the text."""
    ids = [*tokenizer.encode("One, two, three"), tokenizer.control_ids["<|im_end|>"]]
    for stops in (StopSet(), StopSet(["two, th"])):
        choice = ChoiceText(tokenizer, [], stops, every_entry=True, offset=7)

        text, pieces, _ = run(choice, tokens_of(ids, "stop"))

        entries = [entry for piece in pieces for entry in piece.entries]
        assert choice.completion_tokens == len(entries)
        assert text == "".join(entry.text for entry in entries)
        assert 7 == entries[0].offset
        assert all(a.end == b.offset for a, b in pairwise(entries))


def test_a_stop_string_may_stay_in_the_text(tokenizer: TextTokenizer) -> None:
    """include_stop shows it, and nothing after it."""
    ids = tokenizer.encode("One, two, three, four")
    choice = ChoiceText(tokenizer, [], StopSet(["two, th"]), include_stop=True)

    text, pieces, reason = run(choice, tokens_of(ids))

    assert ("One, two, th", "stop") == (text, reason)
    assert text == "".join(entry.text for piece in pieces for entry in piece.entries)


def test_the_mean_logprob_is_over_all_counted_tokens(tokenizer: TextTokenizer) -> None:
    """The end token's belongs to it, so that a long answer is not better for having an end."""
    ids = [*tokenizer.encode("Paris."), tokenizer.control_ids["<|im_end|>"]]
    choice = ChoiceText(tokenizer, [], StopSet())

    run(choice, tokens_of(ids, "stop"))

    assert pytest.approx(-(len(ids) - 1) / 2) == choice.mean_logprob
