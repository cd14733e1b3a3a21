"""Small texts that would cost the grammar library hours or gigabytes are refused before it sees them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.text.tools_grammar import tools_grammar
from shared import grammar_limits
from shared.grammar import problem
from shared.grammar_limits import (
    MAX_LITERAL_CHARS,
    MAX_PATTERN_PROPERTIES,
    MAX_PROPERTIES,
    MAX_REPEATS,
    MAX_UNITS,
)
from shared.grammar_text import GrammarText
from shared.wire import MAX_GRAMMAR_CHARS, Grammar


def excess(grammar: Grammar) -> str | None:
    """What of a grammar is beyond a limit."""
    return grammar_limits.excess(GrammarText.read(grammar))


def of(schema: Any) -> str | None:
    """What is wrong with a JSON schema, and the same in a Lark grammar that holds it."""
    text = json.dumps(schema)
    alone = excess(Grammar(kind="json_schema", text=text))
    inner = excess(Grammar(kind="lark", text=f'start: "a" | %json {text}\n'))
    assert alone == inner
    return alone


def multiple(*values: float) -> dict[str, Any]:
    """Numbers that are each a multiple of another of `values`."""
    return {"anyOf": [{"type": "number", "multipleOf": value} for value in values]}


def doubling(levels: int, last: str) -> str:
    """A terminal that is 2**levels times `last`."""
    rules = [f"A{i}: A{i + 1} A{i + 1}" for i in range(levels)]
    return "\n".join(["start: A0", *rules, f"A{levels}: {last}"])


@pytest.mark.parametrize(
    "values",
    [
        [3_000_017],
        [2**31],
        [1e300],
        [MAX_UNITS + 1],
        [997, 1009],
        [10_000, 9_973],
        [99.99991],
        [32_749, 32_719, 32_717, 32_713],
    ],
)
def test_multiples_with_too_many_remainders_are_refused(values: list[float]) -> None:
    """A 36-byte schema took 10 s and 280 MiB for 1000003, hours for 2**31; two of them stopped all compiling."""
    assert "multipleOf" in (of(multiple(*values)) or "")


@pytest.mark.parametrize(
    "values",
    [[1], [0.01], [0.0001], [0.25], [1e-9], [10**9], [60, 3600], [65_536], [86_400], [0.01, 5, 100], [0]],
)
def test_multiples_that_people_use_are_accepted(values: list[float]) -> None:
    """Cents, seconds of a day, pages, powers of ten."""
    assert of(multiple(*values)) is None


@pytest.mark.parametrize(
    ("extra", "is_refused"),
    [
        ({}, False),
        ({"patternProperties": {"^x": {}}}, True),
        ({"allOf": [{}]}, True),
        ({"items": {"$ref": "#"}}, True),
    ],
)
def test_multiples_that_cannot_meet_do_not_count_together(extra: dict[str, Any], *, is_refused: bool) -> None:
    """A price and a span of hours are two properties; their least common multiple is 360,000 cents."""
    price, span = {"type": "number", "multipleOf": 0.01}, {"type": "integer", "multipleOf": 3600}
    schema = {"type": "object", "properties": {"price": price, "span": span}} | extra
    assert is_refused == (excess(Grammar(kind="json_schema", text=json.dumps(schema))) is not None)


def test_a_multiple_meets_that_of_its_own_parts() -> None:
    """allOf beside multipleOf is one value."""
    schema = {"multipleOf": 997, "allOf": [{"multipleOf": 1009}]}
    assert excess(Grammar(kind="json_schema", text=json.dumps(schema)))


def test_a_multiple_is_found_wherever_it_is() -> None:
    """Also under other keywords, and with its name spelled with escapes."""
    deep = {"$defs": {"a": {"items": [{"allOf": [{"multipleOf": 97_003}, {"multipleOf": 89}]}]}}}
    spelled = '{"type": "integer", "multiple\\u004ff": 3000017}'

    assert of(deep)
    assert excess(Grammar(kind="json_schema", text=spelled))
    assert excess(Grammar(kind="lark", text=f"start: %json {spelled}"))


@pytest.mark.parametrize("before", ['<"a>', '/"/', '# "', '// "', '"\\\\"', '%json {"const": "\\""}'])
def test_nothing_in_front_hides_what_follows_in_a_lark_grammar(before: str) -> None:
    """Quotes in special tokens, regular expressions, comments and JSON do not begin a text."""
    text = f'start: {before}\n | %json {{"multipleOf": 3000017}} /x/ "y"'

    assert excess(Grammar(kind="lark", text=text))


def test_a_long_name_is_read_once() -> None:
    """An expression that tried every way to cut it took minutes, which the time limit of tests ends."""
    assert excess(Grammar(kind="lark", text="a" * MAX_GRAMMAR_CHARS)) is None


def test_a_schema_in_quotes_or_in_a_comment_is_none() -> None:
    """It is text."""
    schema = '%json {\\"multipleOf\\": 3000017}'

    assert excess(Grammar(kind="lark", text=f'start: "{schema}" # {schema}')) is None


@pytest.mark.parametrize(
    ("limit", "keyword"), [(MAX_PROPERTIES, "properties"), (MAX_PATTERN_PROPERTIES, "patternProperties")]
)
def test_too_many_properties_are_refused(limit: int, keyword: str) -> None:
    """Compiling takes the square of their number: 25 s for 10,000, and 2,000 patterns stopped the router."""
    names = [f"^p{i}_" for i in range(limit + 1)]

    assert keyword in (of({keyword: dict.fromkeys(names, True)}) or "")
    assert of({keyword: dict.fromkeys(names[1:], True)}) is None


@pytest.mark.parametrize("part", ["a?", "b*", "(|c)", "d{0,1}"])
def test_rows_of_what_may_be_left_out_are_refused(part: str) -> None:
    """60,000 times a? took more than 1 GB."""
    row = part * (MAX_REPEATS + 1)

    assert excess(Grammar(kind="regex", text=row))
    assert of({"type": "string", "pattern": row})
    assert excess(Grammar(kind="lark", text=f"start: /{row}/"))
    assert excess(Grammar(kind="lark", text="start: A\nA: " + '"a"? ' * (MAX_REPEATS + 1)))
    assert excess(Grammar(kind="lark", text="start: " + '"a"? ' * (MAX_REPEATS + 1)))


@pytest.mark.parametrize("last", ['"b"?', '"b"', "/b*/", "C\nC: /c/"])
def test_a_terminal_counts_with_all_that_it_names(last: str) -> None:
    """173 bytes of terminals that each name the next one twice took 7 s and 500 MiB, three more lines hours."""
    assert excess(Grammar(kind="lark", text=doubling(14, last)))
    assert excess(Grammar(kind="lark", text=doubling(400, last)))
    assert excess(Grammar(kind="lark", text=doubling(8, last))) is None
    users = "".join(f"\nB{i}: A0 /{i}/" for i in range(40))
    assert excess(Grammar(kind="lark", text=doubling(8, last) + users))


@pytest.mark.parametrize(
    "text",
    [
        doubling(14, '"b"?') + "\nX: X",
        doubling(14, '"b"?') + '\nx: %lark {\nstart: A0\nA0: "c"\n}',
        'start: %lark { A: "b"? "b"? B\nB: ' + "C " * 90 + "\nC: " + '"b"? ' * 90 + "\nstart: A\n}",
    ],
)
def test_other_terminals_do_not_hide_a_large_one(text: str) -> None:
    """Neither one that is never used nor another grammar's of the same name."""
    assert excess(Grammar(kind="lark", text=text))


def test_rules_are_not_terminals() -> None:
    """They are not written out."""
    assert excess(Grammar(kind="lark", text=doubling(20, '"b"?').replace("A", "a"))) is None


def test_one_long_text_is_refused() -> None:
    """It keeps 400 bytes for each of its characters."""
    text = "x" * (MAX_LITERAL_CHARS + 1)

    assert of({"enum": [text]})
    assert of({"const": {"a": [text]}})
    assert excess(Grammar(kind="regex", text=text))
    assert excess(Grammar(kind="lark", text=f'start: "{text}"'))
    assert of({"enum": [text[:1000]], "description": text}) is None


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="json_schema", text="{"),
        Grammar(kind="lark", text="start: %json {"),
        Grammar(kind="lark", text="start: A\nA: B\nB: A"),
        Grammar(kind="json_schema", text="[" * 100_000),
        Grammar(kind="lark", text="start: %json " + "[" * 100_000),
    ],
)
def test_what_is_no_grammar_is_refused_and_nothing_worse(grammar: Grammar) -> None:
    """By whichever check notices."""
    assert problem(grammar)


def test_many_tools_are_within_the_limits() -> None:
    """A hundred of twenty parameters each."""
    parameters = {
        f"p{i}": {"type": ["string", "null"], "description": "What? (a {thing})"} for i in range(20)
    }
    schema = json.dumps({"type": "object", "properties": parameters, "additionalProperties": False})
    text = tools_grammar({f"tool_{i}": schema for i in range(100)}, must_call=False, parallel=True, marks=[])

    assert excess(Grammar(kind="lark", text=text)) is None


def test_the_reason_names_the_limit() -> None:
    """For whoever asked, in one line."""
    reason = problem(Grammar(kind="json_schema", text='{"multipleOf": 3000017}'))

    assert str(MAX_UNITS) in (reason or "")
