"""Links between the parts of a JSON schema: what lies in what, and what a $ref leads to.

Every object is taken for a schema, which makes the bound stricter, not looser. A $ref is followed in all the ways
in which it can be meant: by its path from the root and from each part with an $id, or to any part with a name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from shared.grammar_links import END, Links, add_link, no_links
from shared.grammar_text import UnfitGrammar, children, containers

# Names of properties in all. The library recurses over those of one object, and merges the objects of an allOf:
# 300 bytes of stack each, so a thread of 8 MiB dies at 28,000.
MAX_NAMES = 5_000
MAX_BASES = 32  # parts with an $id; a schema's paths are resolved from each of them
_NAMED = "(named)"
_NAMES = ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")


def json_links(schema: Any) -> Links:
    """Nodes are the root and what a $ref leads to, by identity. Raises UnfitGrammar for too many names."""
    parts = [part for part in containers(schema) if isinstance(part, dict)]
    _count_names(parts)
    refs = {ref for part in parts for ref in _refs(part)}
    links = no_links()
    if refs:
        # "id" is a name in draft 4 only; elsewhere it is what data often has.
        names = (
            _NAMES if any("draft-0" in str(part.get("$schema")) for part in parts) else ("$id", *_NAMES[2:])
        )
        named = [part for part in parts if any(isinstance(part.get(name), str | bool) for name in names)]
        bases = [schema] + [part for part in named if part is not schema and ("$id" in part or "id" in part)]
        if len(bases) > MAX_BASES:
            raise UnfitGrammar(f"more than {MAX_BASES} of its parts have an $id")
        for part in named:
            add_link(links, _NAMED, id(part), 1)
        leads_to = {ref: [id(target) for base in bases for target in _targets(base, ref)] for ref in refs}
    else:
        named, leads_to = [], {}
    nodes = {id(schema), *map(id, named), *(target for targets in leads_to.values() for target in targets)}
    _link_parts(schema, nodes, leads_to, links)
    return links


def _link_parts(schema: Any, nodes: set[int], leads_to: dict[str, list[int]], links: Links) -> None:
    todo: list[tuple[Any, int, int]] = [(schema, id(schema), 0)]
    while todo:
        value, owner, depth = todo.pop()
        if not isinstance(value, dict | list):
            continue
        if id(value) in nodes and depth:
            add_link(links, owner, id(value), depth)
            owner, depth = id(value), 0
        add_link(links, owner, END, depth + 1)
        if isinstance(value, dict):
            for ref in _refs(value):
                for target in leads_to[ref] if _is_path(ref) else (*leads_to[ref], _NAMED):
                    add_link(links, owner, target, depth + 1)
        todo += [(inner, owner, depth + 1) for inner in children(value)]


def _refs(part: dict[str, Any]) -> Iterator[str]:
    for key in ("$ref", "$dynamicRef", "$recursiveRef"):
        if isinstance(part.get(key), str):
            yield part[key]


def _is_path(ref: str) -> bool:
    return ref == "#" or ref.startswith("#/")


def _targets(base: Any, ref: str) -> Iterator[Any]:
    """What the path in `ref` leads to from there: nothing, one, or two if it can be read in two ways."""
    fragment = ref.partition("#")[2]
    for path in {tuple(map(unquote, fragment.split("/"))), tuple(unquote(fragment).split("/"))}:
        value = base
        for step in path[1:] if not path[0] else ():
            key = step.replace("~1", "/").replace("~0", "~")
            try:
                value = value[int(key) if isinstance(value, list) else key]
            except (LookupError, ValueError, TypeError):
                break
        else:
            if isinstance(value, dict | list) and not path[0]:
                yield value


def _count_names(parts: list[dict[str, Any]]) -> None:
    names: set[str] = set()
    for part in parts:
        for key in ("properties", "patternProperties", "required"):
            value = part.get(key)
            if isinstance(value, dict | list):
                names.update(name for name in value if isinstance(name, str))
    if len(names) > MAX_NAMES:
        raise UnfitGrammar(f"it names more than {MAX_NAMES} properties")
