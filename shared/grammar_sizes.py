"""How large a Lark grammar is: its texts, its patterns, and what may be left out or repeated in it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from shared.grammar_text import Token

_REPEATS = "?*{("
_HAVE_REPEATS = ("regex", "name", "mark")  # kinds of tokens


def repeats(pattern: str) -> int:
    """At most so many parts of a regular expression may be left out or repeated; a group may be empty.

    A row of n of them, as in a?a?a?, has n * n states.
    """
    return sum(map(pattern.count, _REPEATS))


@dataclass(frozen=True, slots=True)
class LarkSizes:
    """literals: texts and regular expressions, with their quotes and slashes.

    num_repeats: parts that may be left out or repeated. A terminal is one regular expression, so what it names
    counts again at each place.
    """

    literals: list[str]
    num_repeats: int

    @classmethod
    def of(cls, tokens: Sequence[Token]) -> LarkSizes:
        """Where a count cannot be exact it is too high."""
        texts = [word.rstrip("i") for kind, word, _ in tokens if kind == "text"]
        regexes = [word.rstrip("imslux") for kind, word, _ in tokens if kind == "regex"]
        in_all = repeats("".join(word for kind, word, _ in tokens if kind in _HAVE_REPEATS))
        return cls(texts + regexes, max(in_all, _size_of_terminals(tokens)))


def _size_of_terminals(tokens: Iterable[Token]) -> int:
    """Parts of all terminals with what they name written out: without end if one names itself. A text is one part.

    Of the same name in several grammars (%lark): all of them together.
    """
    own: dict[str, list[str]] = {}
    named: dict[str, Counter[str]] = {}
    owner = ""
    for kind, word, begins in tokens:
        if kind == "name" and begins:
            owner = word.lstrip("!?")
            if _is_terminal(owner):
                own.setdefault(owner, [])
                named.setdefault(owner, Counter())
        elif owner in own:
            if kind == "text":
                own[owner].append(_REPEATS[0])
            elif kind in _HAVE_REPEATS:
                own[owner].append(word)
            if kind == "name" and _is_terminal(word):
                named[owner][word] += 1
    sizes: dict[str, int] = {}
    try:
        for name in TopologicalSorter(named).static_order():
            sizes[name] = repeats("".join(own.get(name, ()))) + sum(
                max(1, sizes[other]) * number for other, number in named.get(name, {}).items()
            )
    except CycleError:
        return sys.maxsize
    return sum(sizes[name] for name in named)


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()
