"""What a Lark grammar is made of, as far as its size goes. Read as llguidance's own lexer does, never compiled."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

# A special token comes before text: it may have a quote in it.
_TOKEN = re.compile(
    r"""(?P<json>%(?:json|regex|llguidance))[ \t\r\n]*
    |(?P<special><[^<>\s]+>)
    |(?P<text>"(?:\\.|[^"\\\n])*+")
    |(?P<regex>/(?:\\[^\n]|[^/\\])++/)
    |(?P<comment>(?:\#|//)[^\n]*)""",
    re.VERBOSE,
)
# At the beginning of a line, or of a grammar in a grammar: %lark { ... }.
_DEFINITION = re.compile(r"(?:^|(?<=\{))[ \t]*+[!?]*+([A-Za-z_][\w-]*+)[^:\n{]*+:", re.MULTILINE)
_TERMINAL = re.compile(r"(?<![\w-])_?[A-Z][_A-Z0-9-]*(?![\w-])")
_REPEATS = "?*{("  # as in shared.grammar_limits.repeats
_TEXT = '"'  # stands for a text in what is left


def parse_schema(text: str) -> Any:
    """JSON, whatever its numbers. Raises ValueError, RecursionError."""
    return json.loads(text, parse_int=float)


@dataclass(frozen=True, slots=True)
class LarkParts:
    """schemas: what follows %json. texts, regexes: with their quotes and slashes.

    num_repeats: parts that may be left out or repeated. A terminal is one regular expression, so what it names
    counts again at each place.
    """

    schemas: list[Any]
    texts: list[str]
    regexes: list[str]
    num_repeats: int

    @classmethod
    def read(cls, text: str) -> LarkParts:
        """Raises ValueError or RecursionError for wrong JSON in it."""
        decoder = json.JSONDecoder(parse_int=float)
        schemas, texts, regexes, left = [], [], [], []
        position = 0
        while (token := _TOKEN.search(text, position)) is not None:
            left.append(text[position : token.start()])
            position = token.end()
            if token["json"]:
                value, position = decoder.raw_decode(text, position)
                if token["json"] == "%json":
                    schemas.append(value)
            elif token["text"]:
                texts.append(token["text"])
                left.append(_TEXT)
            elif token["regex"]:
                regexes.append(token["regex"])
                left.append("".join(c for c in token["regex"] if c in _REPEATS))
        rules = "".join([*left, text[position:]])
        in_all = sum(map(rules.count, _REPEATS))
        return cls(schemas, texts, regexes, max(in_all, _size_of_terminals(rules)))


def _size_of_terminals(rules: str) -> int:
    """Parts of all terminals with what they name written out: without end if one names itself."""
    starts = [*_DEFINITION.finditer(rules)]
    ends = [*(match.start() for match in starts[1:]), len(rules)]
    bodies: dict[str, str] = {}  # of the same name in several grammars: all of them
    for match, end in zip(starts, ends, strict=True):
        if _TERMINAL.fullmatch(match[1]):
            bodies[match[1]] = bodies.get(match[1], "") + rules[match.end() : end]
    named = {name: Counter(_TERMINAL.findall(body)) for name, body in bodies.items()}
    sizes: dict[str, int] = {}
    try:
        for name in TopologicalSorter(named).static_order():
            own = sum(map(bodies.get(name, "").count, _REPEATS + _TEXT))
            sizes[name] = own + sum(
                max(1, sizes[other]) * number for other, number in named.get(name, {}).items()
            )
    except CycleError:
        return sys.maxsize
    return sum(sizes[name] for name in bodies)
