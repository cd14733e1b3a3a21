"""Logprobs to JSON, a piece at a time: what choices share, as they do an echoed prompt, is encoded once for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from router.text.choice import Piece, TokenEntry

MakeLists = Callable[[Sequence[TokenEntry]], dict[str, Any]]
"""Entries to what the API has of them: lists, in the order of the entries, and perhaps constants."""


class LogprobEncoder:
    """One for all of an answer."""

    def __init__(self, make: MakeLists) -> None:
        self._make = make
        self._last: tuple[Sequence[TokenEntry], orjson.Fragment] | None = None

    def one(self, entries: Sequence[TokenEntry]) -> orjson.Fragment:
        """Of one piece. Encoded once if choices that share it come right after each other."""
        if self._last is None or self._last[0] is not entries:
            self._last = (entries, orjson.Fragment(orjson.dumps(self._make(entries))))
        return self._last[1]

    def joined(self, choices: Sequence[Sequence[Piece]]) -> list[dict[str, Any]]:
        """Of whole choices, each list over all of its pieces.

        Never much at a time: orjson keeps every other thread waiting while it works.
        """
        empty = self._make(())
        parts: dict[
            int, dict[str, bytes]
        ] = {}  # by id of the piece: all of them live for as long as this runs
        found: list[dict[str, Any]] = []
        for pieces in choices:
            scored = [piece for piece in pieces if piece.entries]
            for piece in scored:
                if id(piece) not in parts:
                    parts[id(piece)] = _bare_lists(self._make(piece.entries))
            found.append(
                {
                    name: _list(parts[id(piece)][name] for piece in scored)
                    if isinstance(value, list)
                    else value
                    for name, value in empty.items()
                }
            )
        return found


def _bare_lists(lists: dict[str, Any]) -> dict[str, bytes]:
    """Each list without its brackets."""
    return {name: orjson.dumps(value)[1:-1] for name, value in lists.items() if isinstance(value, list)}


def _list(parts: Iterable[bytes]) -> orjson.Fragment:
    return orjson.Fragment(b"[" + b",".join(parts) + b"]")
