"""What a grammar may hold, counted in its text: what the library's own limits do not bound.

In: a grammar's text, taken apart. Out: the limit that it is beyond, in words, or None. Each stands for work that
grows without end, or with the square of what is counted. At the limit a grammar compiles in a second or two and
takes some tens of MiB (llguidance 1.9.1). Where a count cannot be exact it is too high, never too low.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal
from math import lcm
from typing import Any

from shared.grammar_sizes import LarkSizes, repeats
from shared.grammar_text import GrammarText, children, containers

MAX_UNITS = 100_000
MAX_PROPERTIES = 4_000
MAX_PATTERN_PROPERTIES = 100
MAX_REPEATS = 8_192
MAX_LITERAL_CHARS = 1 << 15

# Two subschemas of one value, or of one property, come from these.
_MEETING = ("allOf", "anyOf", "oneOf", "patternProperties")
_ANNOTATIONS = ("$comment", "description", "title", "default")


def excess(text: GrammarText) -> str | None:
    """Which limit the grammar is beyond."""
    if text.grammar.kind == "regex":
        pattern = text.grammar.text
        return _too_long([pattern]) or _too_many("repetitions", repeats(pattern), MAX_REPEATS)
    lark = LarkSizes.of(text.tokens)
    return (
        _too_long(lark.literals)
        or _too_many("repetitions", lark.num_repeats, MAX_REPEATS)
        or _of_schemas(text.schemas)
    )


def _of_schemas(schemas: list[Any]) -> str | None:
    nodes = [node for schema in schemas for node in containers(schema)]
    objects = [node for node in nodes if isinstance(node, dict)]
    properties, named_by_pattern = (
        [key for node in objects if isinstance(node.get(keyword), dict) for key in node[keyword]]
        for keyword in ("properties", "patternProperties")
    )
    patterns = [*named_by_pattern, *(v for node in objects if isinstance(v := node.get("pattern"), str))]
    return (
        _of_multiples(schemas, objects, may_meet=len(schemas) > 1 or any("$ref" in node for node in objects))
        or _too_many("properties", len(properties), MAX_PROPERTIES)
        or _too_many("patternProperties", len(named_by_pattern), MAX_PATTERN_PROPERTIES)
        or _too_many("repetitions in patterns", sum(map(repeats, patterns)), MAX_REPEATS)
        or _too_long([*patterns, *_texts(nodes)])
    )


def _of_multiples(schemas: list[Any], objects: list[dict[str, Any]], *, may_meet: bool) -> str | None:
    """Compiling takes 10 us and 280 bytes for each remainder, and no limit of the library ends it.

    Numbers that meet, as in allOf or anyOf, have the remainders of their least common multiple. may_meet: any two.
    """
    wanted = _multiples(objects)
    if not all(value.is_finite() and abs(value.adjusted()) < 32 for value in wanted):
        return "multipleOf is out of range"
    # In units of the last decimal: 0.25 is 25 of them.
    costly = sum(units for value in wanted if not _is_round(units := int(value.scaleb(_decimals(value)))))
    meeting = (
        [wanted] if may_meet else (_multiples(containers(part)) for part in _where_subschemas_meet(schemas))
    )
    if costly <= MAX_UNITS and all(map(_can_meet, meeting)):
        return None
    return (
        f"multipleOf has more than {MAX_UNITS} units of its last decimal"
        " (of all in the schema their sum counts, of those that may meet their least common multiple)"
    )


def _multiples(nodes: Iterable[Any]) -> set[Decimal]:
    values = (node.get("multipleOf") for node in nodes if isinstance(node, dict))
    return {Decimal(repr(float(v))) for v in values if isinstance(v, int | float) and v > 0}


def _where_subschemas_meet(root: Any) -> Iterator[Any]:
    """The outermost objects with more than one subschema for one value; what is in them is not looked at."""
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, dict) and any(keyword in node for keyword in _MEETING):
            yield node
        elif isinstance(node, dict | list):
            stack.extend(children(node))


def _can_meet(values: set[Decimal]) -> bool:
    decimals = max(map(_decimals, values), default=0)
    together = lcm(*(int(value.scaleb(decimals)) for value in values))
    return together <= MAX_UNITS or _is_round(together)


def _decimals(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _is_round(units: int) -> bool:
    """One digit and zeros: few remainders matter."""
    return len(str(units).rstrip("0")) == 1


def _texts(nodes: list[Any]) -> Iterator[str]:
    """Texts that can be part of an answer."""
    for node in nodes:
        pairs = node.items() if isinstance(node, dict) else ((None, value) for value in node)
        yield from (value for key, value in pairs if isinstance(value, str) and key not in _ANNOTATIONS)


def _too_long(texts: list[str]) -> str | None:
    return _too_many("characters in one text or pattern", max(map(len, texts), default=0), MAX_LITERAL_CHARS)


def _too_many(what: str, number: int, limit: int) -> str | None:
    return f"more than {limit} {what}" if number > limit else None
