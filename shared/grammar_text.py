"""A grammar's text taken apart, once, for the checks that come before the library: tokens, JSON, texts, patterns.

Read by the same expressions that llguidance has. A text that these do not cover is refused: what is read otherwise
than the library reads it could hide something.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shared.wire import Grammar

# The longest of a kind that begins with the same letter comes first, as in the library's lexer.
_TOKEN = re.compile(
    r"""
    (?P<skip> (?:\#|//)[^\n]* | [ \t]+ )
  | (?P<newline> (?:\r?\n)+[ \t]* )
  | (?P<text> "(?:\\["\\/bfnrt] | \\u[a-fA-F0-9]{4} | \\x[a-fA-F0-9]{2} | [^"\\\x00-\x1F\x7F])*"i? )
  | (?P<regex> /(?:\\. | [^/\\])+/[imslux]* )
  | (?P<constant> <[^<>\s]+> | @[a-zA-Z0-9_\-]+
      | 0[xX][0-9a-fA-F]+ | [+-]?[0-9]+(?:\.[0-9]+|\.(?!\.))?(?:[eE][+-]?[0-9]+)? )
  | (?P<name> !?[_?]?[a-z][_a-z0-9\-]* | _?[A-Z][_A-Z0-9\-]* )
  | (?P<json> %(?:json|regex|llguidance) )
  | (?P<mark> %(?:declare|if|ignore|import|lark|override) | -> | [:,.~|&=+*?]+ | [(){}\[\]_] )
    """,
    re.VERBOSE,
)
# As lenient as can be, whatever its numbers: the library judges.
_DECODER = json.JSONDecoder(strict=False, parse_int=float)
_SPACE = re.compile(r"[ \t\r\n]*")


class UnfitGrammar(ValueError):
    """The library must not see it: it would recurse too deeply, or it cannot be told whether. The text says why."""


# Of a Lark grammar: kind, word, begins. kind: as the groups above, white space and comments left out. begins: it is
# the first of a line or of a nested grammar. A name is defined there; what is no definition there, the library does
# not read to the end. NOTE: plain tuples, for there may be 200,000, and the collector looks at any other object.
Token = tuple[str, str, bool]


@dataclass(frozen=True, slots=True)
class GrammarText:
    """schemas: the JSON schema that it is, or all that a Lark grammar holds. tokens: of a Lark grammar."""

    grammar: Grammar
    schemas: list[Any]
    tokens: list[Token]

    @classmethod
    def read(cls, grammar: Grammar) -> GrammarText:
        """Raises UnfitGrammar. Regular expressions are taken as they are."""
        if grammar.kind == "json_schema":
            return cls(grammar, [_parse_json(grammar.text)], [])
        schemas: list[Any] = []
        tokens = list(_lark_tokens(grammar.text, schemas)) if grammar.kind == "lark" else []
        return cls(grammar, schemas, tokens)


def containers(root: Any) -> Iterator[Any]:
    """Every object and array of a JSON value, each before what it holds."""
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, dict | list):
            yield node
            stack.extend(children(node))


def children(node: Any) -> list[Any]:
    """What an object or array holds."""
    return list(node.values()) if isinstance(node, dict) else node


def _parse_json(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except RecursionError as exc:
        raise UnfitGrammar("it is nested too deeply") from exc
    except ValueError as exc:
        raise UnfitGrammar("it is no JSON") from exc


def _lark_tokens(text: str, schemas: list[Any]) -> Iterator[Token]:
    """schemas: gets what follows each %json."""
    at, begins = 0, True
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise UnfitGrammar(f"it cannot be read from {text[at : at + 20]!r} on")
        at, kind, word = token.end(), token.lastgroup, token[0]
        if kind is None or kind == "skip":
            continue
        if kind == "json":
            value, at = _json_at(text, at)
            if word == "%json":
                schemas.append(value)
        if kind != "newline":
            yield kind, word, begins
        begins = kind == "newline" or word == "{"


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The value that begins there, after white space, and where it ends."""
    space = _SPACE.match(text, at)
    try:
        return _DECODER.raw_decode(text, space.end() if space else at)
    except RecursionError as exc:
        raise UnfitGrammar("its JSON is nested too deeply") from exc
    except ValueError as exc:
        raise UnfitGrammar(f"it has no JSON where it must, at {text[at : at + 20]!r}") from exc
