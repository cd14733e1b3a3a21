"""Links between the rules and terminals of a Lark grammar, of llguidance's kind.

Read token by token, by the same expressions that the library has. A text that these do not cover is refused: what
is read otherwise than the library reads it could hide a link. Links too many only make the bound stricter, so
names of nested grammars (%lark) are not told from the outer ones', nor a rule's attributes from its body.
"""

from __future__ import annotations

import json
import re
from typing import Any

from shared.grammar_links import END, GrammarTooDeep, Links, add_link, no_links

# The longest of a kind that begins with the same letter comes first, as in the library's lexer.
_TOKEN = re.compile(
    r"""
    (?P<skip> (?:\#|//)[^\n]* | [ \t]+ )
  | (?P<newline> (?:\r?\n)+[ \t]* )
  | (?P<literal> "(?:\\["\\/bfnrt] | \\u[a-fA-F0-9]{4} | \\x[a-fA-F0-9]{2} | [^"\\\x00-\x1F\x7F])*"i?
      | /(?:\\. | [^/\\])+/[imslux]*
      | <[^<>\s]+> | @[a-zA-Z0-9_\-]+
      | 0[xX][0-9a-fA-F]+ | [+-]?[0-9]+(?:\.[0-9]+|\.(?!\.))?(?:[eE][+-]?[0-9]+)? )
  | (?P<name> !?[_?]?[a-z][_a-z0-9\-]* | _?[A-Z][_A-Z0-9\-]* )
  | (?P<json> %(?:json|regex|llguidance) )
  | (?P<mark> %(?:declare|if|ignore|import|lark|override) | -> | [:,.~|&=+*?]+ | [(){}\[\]_] )
    """,
    re.VERBOSE,
)
_DECODER = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)
_SPACE = re.compile(r"[ \t\r\n]*")


def lark_links(text: str) -> tuple[Links, list[Any]]:
    """And the JSON schemas in it. Raises GrammarTooDeep for what cannot be read."""
    links, schemas = no_links(), []
    owner, depth = "", 0  # the definition that is being read, and brackets open in it
    outer: list[tuple[str, int]] = []  # the same of the definitions around %lark { }
    at, begins = 0, True
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise GrammarTooDeep(f"it cannot be read from {text[at : at + 20]!r} on")
        at, kind, word = token.end(), token.lastgroup, token[0]
        if kind == "skip":
            continue
        if kind == "json":
            value, at = _json_at(text, at)
            if word == "%json":
                schemas.append(value)
        elif kind == "name" and begins:
            owner, depth = word.lstrip("!?"), 0
            if outer:
                add_link(links, outer[-1][0], owner, outer[-1][1] + 1)
        elif kind == "name":
            add_link(links, owner, word.lstrip("!?"), depth + 1)
        elif word in ("(", "["):
            depth += 1
            add_link(links, owner, END, depth)
        elif word in (")", "]"):
            depth -= 1
        elif word == "{":
            outer.append((owner, depth))
        elif word == "}" and outer:
            owner, depth = outer.pop()
        # A definition begins a line or a nested grammar. What is none there, the library does not read to the end.
        begins = kind == "newline" or word == "{"
    return links, schemas


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The value that begins there, after white space, and where it ends."""
    space = _SPACE.match(text, at)
    try:
        return _DECODER.raw_decode(text, space.end() if space else at)
    except RecursionError as exc:
        raise GrammarTooDeep("its JSON is nested too deeply") from exc
    except ValueError as exc:
        raise GrammarTooDeep(f"it has no JSON where it must, at {text[at : at + 20]!r}") from exc
