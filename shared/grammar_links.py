"""What leads where in a grammar, and how many levels deeper.

A node is a rule, a terminal or a part of a schema that something refers to. Of mentions the deepest counts.
"""

from __future__ import annotations

from collections import defaultdict

Links = dict[object, dict[object, int]]

END = "(end)"  # where brackets lead that hold no reference; no name has parentheses


def no_links() -> Links:
    """To be filled by `add_link`."""
    return defaultdict(dict)


def add_link(links: Links, source: object, target: object, levels: int) -> None:
    """Keep the deepest."""
    targets = links[source]
    targets[target] = max(targets.get(target, 0), levels)
