"""Links between the rules and terminals of a Lark grammar, of llguidance's kind.

Links too many only make the bound stricter, so names of nested grammars (%lark) are not told from the outer ones',
nor a rule's attributes from its body.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.grammar_links import END, Links, add_link, no_links
from shared.grammar_text import Token


def lark_links(tokens: Iterable[Token]) -> Links:
    """Nodes are names."""
    links = no_links()
    owner, depth = "", 0  # the definition that is being read, and brackets open in it
    outer: list[tuple[str, int]] = []  # the same of the definitions around %lark { }
    for kind, word, begins in tokens:
        if kind == "name" and begins:
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
    return links
