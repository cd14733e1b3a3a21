"""What would overflow the grammar library's stack: a signal, not an exception, and the process is gone.

llguidance follows rules, terminals and $refs by native recursion and bounds none of it but the nesting of one
text. In: a grammar's text, taken apart. Out: why it goes too deep, or None; None does not mean that it is good.
Linear in the text and never recursive itself. Where the links come from: shared.grammar_lark, shared.grammar_json.
"""

from __future__ import annotations

from collections.abc import Iterator

from shared.grammar_json import json_links
from shared.grammar_lark import lark_links
from shared.grammar_links import Links
from shared.grammar_text import GrammarText, UnfitGrammar

# Levels of rules and brackets, or of objects, arrays and $refs, on any one way through. Measured on llguidance
# 1.9.1: none of them takes more than 4.2 KiB of stack, so a thread of 8 MiB dies at 2,000 or later, and 2 MiB are
# enough for what passes. NOTE: 1 MiB is not (musl); threads of Python have 8 MiB with glibc, 16 MiB on macOS.
MAX_LEVELS = 400


def too_deep(text: GrammarText) -> str | None:
    """What is wrong, in one line. Regular expressions are bounded by the library: 250 levels."""
    try:
        found = [lark_links(text.tokens), *map(json_links, text.schemas)]
    except UnfitGrammar as exc:
        return str(exc)
    if any(longest_way(links) > MAX_LEVELS for links in found):
        return f"its references lead more than {MAX_LEVELS} levels deep"
    return None


def longest_way(links: Links) -> int:
    """An upper bound of the levels on any way that meets no node twice, whatever the order.

    The exact length is NP-hard where links form cycles. So a set of nodes that all lead to each other counts as if
    every one were passed, each by its deepest link within the set; sets among themselves are exact.
    """
    longest: dict[object, int] = {}
    for members in _components(links):
        within = beyond = 0
        for node in members:
            inner = 0
            for target, levels in links.get(node, {}).items():
                if target in members:
                    inner = max(inner, levels)
                else:
                    beyond = max(beyond, levels + longest[target])
            within += inner
        longest.update(dict.fromkeys(members, within + beyond))
    return max(longest.values(), default=0)


def _components(links: Links) -> list[set[object]]:
    """Sets of nodes that lead to each other, each set after those that it leads to. Source: Tarjan, 1972."""
    found: list[set[object]] = []
    lowest: dict[object, int] = {}  # of each node met: the first met that it leads back to, by number
    waiting: dict[object, int] = {}  # nodes of sets that are not complete, with their own numbers
    for root in links:
        path: list[tuple[object, Iterator[object]]] = []
        to_enter = None if root in lowest else root
        while path or to_enter is not None:
            if to_enter is not None:
                waiting[to_enter] = lowest[to_enter] = len(lowest)
                path.append((to_enter, iter(links.get(to_enter, {}))))
            node, targets = path[-1]
            to_enter = None
            for target in targets:
                if target not in lowest:
                    to_enter = target
                    break
                lowest[node] = min(lowest[node], waiting.get(target, lowest[node]))
            if to_enter is not None:
                continue
            path.pop()
            if path:
                parent = path[-1][0]
                lowest[parent] = min(lowest[parent], lowest[node])
            if lowest[node] == waiting[node]:
                found.append(members := set())
                while node not in members:
                    members.add(waiting.popitem()[0])
    return found
