"""Logprobs of many choices: the same JSON as of each alone, made once for what they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from router.openai.scores import LogprobEncoder
from router.text.choice import Piece, TokenEntry


class Lists:
    """Ids and texts of entries; counts the entries that were looked at."""

    def __init__(self) -> None:
        self.num_made = 0

    def __call__(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        self.num_made += len(entries)
        return {"ids": [e.token_id for e in entries], "texts": [e.text for e in entries], "refusal": None}


def piece_of(*ids: int) -> Piece:
    """A piece with these tokens."""
    return Piece("x", tuple(TokenEntry(i, f't"{i}', 0, -1.0, ()) for i in ids))


def test_choices_share_what_they_begin_with() -> None:
    """A prompt echoed before many choices was once encoded for each."""
    lists = Lists()
    echo = [piece_of(1, 2), piece_of(3)]
    choices = [[*echo, piece_of(10 + i), Piece("", (), "length")] for i in range(16)]

    found = LogprobEncoder(lists).joined(choices)

    assert 3 + 16 == lists.num_made
    assert [
        {"ids": [1, 2, 3, 10 + i], "texts": [f't"{j}' for j in (1, 2, 3, 10 + i)], "refusal": None}
        for i in range(16)
    ] == orjson.loads(orjson.dumps(found))


def test_a_choice_without_entries_has_the_lists() -> None:
    """Empty ones."""
    found = LogprobEncoder(Lists()).joined([[], [Piece("x")]])

    assert [{"ids": [], "texts": [], "refusal": None}] * 2 == orjson.loads(orjson.dumps(found))


def test_a_piece_streamed_to_one_choice_after_the_other_is_encoded_once() -> None:
    """Another one is encoded anew, however alike."""
    lists = Lists()
    encoder = LogprobEncoder(lists)
    shared, other = piece_of(1, 2).entries, piece_of(1, 2).entries

    told = orjson.dumps([encoder.one(shared), encoder.one(shared), encoder.one(other)])

    assert [{"ids": [1, 2], "texts": ['t"1', 't"2'], "refusal": None}] * 3 == orjson.loads(told)
    assert 4 == lists.num_made
