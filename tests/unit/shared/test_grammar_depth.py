"""What would overflow the grammar library's stack is refused before it sees it, and nothing ordinary is."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from shared import grammar_depth
from shared.grammar_depth import MAX_LEVELS, longest_way
from shared.grammar_json import MAX_NAMES
from shared.grammar_text import GrammarText, UnfitGrammar
from shared.wire import MAX_GRAMMAR_CHARS, Grammar

Make = Callable[[int], Grammar]


def too_deep(grammar: Grammar) -> str | None:
    """Why the library must not see it."""
    try:
        return grammar_depth.too_deep(GrammarText.read(grammar))
    except UnfitGrammar as exc:
        return str(exc)


def _lark(body: str, name: str = "r", head: str = "start: {}0\n") -> Make:
    """A chain of definitions, each with `body`, in which @ is the next one."""

    def make(num_links: int) -> Grammar:
        lines = [f"{name}{i}: {body.replace('@', f'{name}{i + 1}')}" for i in range(num_links)]
        return _grammar("lark", head.format(name) + "\n".join([*lines, f'{name}{num_links}: "b"']))

    return make


def _schema(before: str, after: str, *, path: str = "#/$defs/a", part: str = "{{}}") -> Make:
    """A chain of $refs, each inside `before` and `after`. part: what every definition has as well."""

    def make(num_links: int) -> Grammar:
        own = [part.format(i) for i in range(num_links + 1)]
        refs = [f'{before}{{"$ref":"{path}{i + 1}"}}{after}' for i in range(num_links)]
        defs = [f'"a{i}":{_merged(own[i], ref)}' for i, ref in enumerate([*refs, "{}"])]
        return _grammar("json_schema", f'{{"$ref":"{path}0","$defs":{{{",".join(defs)}}}}}')

    return make


def _merged(one: str, other: str) -> str:
    return json.dumps({**json.loads(one), **json.loads(other)})


def _inside_lark(make: Make) -> Make:
    return lambda num_links: _grammar("lark", f"start: %json {make(num_links).text}")


def _required(num_names: int) -> Grammar:
    names = [f"a{i}" for i in range(num_names)]
    return _grammar("json_schema", json.dumps({"required": names}, separators=(",", ":")))


def _condition(num_levels: int) -> Grammar:
    tests = "not(" * num_levels + "lt(_, 5)" + ")" * num_levels
    return _grammar("lark", f'start: p::0x0\np::_: "a" %if {tests}')


def _grammar(kind: str, text: str) -> Grammar:
    return Grammar.model_validate({"kind": kind, "text": text})


# At the number beside it, and often below, the library of 1.9.1 kills a process with 8 MiB of stack.
KILLS: dict[str, tuple[Make, int]] = {
    "rules": (_lark('@ | "a"'), 2_700),
    "rules, in brackets": (_lark("((@))"), 1_300),
    "rules, doubled": (_lark('@ @ | "a"'), 2_700),
    "rules that lead back": (_lark('"x" @ | r0'), 2_700),
    "terminals": (_lark('@ | "a"', "T"), 3_600),
    "terminals, negated": (_lark("~@", "T"), 3_000),
    "terminals, both": (_lark("@ & /[a-z]*/", "T"), 3_600),
    "terminals that are ignored": (_lark('@ | "a"', "T", 'start: "x"\n%ignore {}0\n'), 3_600),
    "conditions": (_condition, 24_300),
    "allOf": (_schema('{"allOf":[', "]}"), 1_500),
    "anyOf": (_schema('{"anyOf":[', ',{"type":"null"}]}'), 1_100),
    "oneOf": (_schema('{"oneOf":[', ',{"type":"null"}]}'), 1_100),
    "items": (_schema('{"items":', "}"), 1_100),
    "prefixItems": (_schema('{"prefixItems":[', "]}"), 900),
    "properties": (_schema('{"type":"object","properties":{"a":', "}}"), 1_000),
    "additionalProperties": (_schema('{"additionalProperties":', "}"), 1_100),
    "patternProperties": (_schema('{"type":"object","patternProperties":{"a":', "}}"), 1_000),
    "nothing but refs": (_schema("", ""), 2_700),
    "refs with more beside them": (_schema("", "", part='{{"minimum":{}}}'), 2_300),
    "escaped": (_schema('{"items":', "}", path="#/%24defs/%61"), 1_100),
    "anchors": (_schema('{"items":', "}", path="#a", part='{{"$anchor":"a{}"}}'), 1_100),
    "names of resources": (_schema('{"items":', "}", path="/a", part='{{"$id":"/a{}"}}'), 1_100),
    "in a Lark grammar": (_inside_lark(_schema('{"items":', "}")), 1_100),
    "required names": (_required, 28_500),
}
CASES = pytest.mark.parametrize(("make", "kills_at"), KILLS.values(), ids=KILLS)


def _most_links(make: Make, kills_at: int) -> int:
    """How many are accepted."""
    good, bad = 1, kills_at // 5
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if too_deep(make(middle)) else (middle, bad)
    return good


@CASES
def test_what_kills_the_library_is_refused_with_a_margin(make: Make, kills_at: int) -> None:
    """A router once died of one request of 64 KB; now a fifth of what kills is refused."""
    assert too_deep(make(kills_at)) is not None
    assert too_deep(make(kills_at // 5)) is not None


@pytest.mark.slow
def test_the_library_lives_through_the_largest_that_is_accepted() -> None:
    """On a quarter of the stack that threads have, and as a worker compiles it."""
    largest = [make(_most_links(make, kills_at)) for make, kills_at in KILLS.values()]
    given = json.dumps([{"kind": grammar.kind, "text": grammar.text} for grammar in largest])
    done = subprocess.run(
        [sys.executable, "-c", _FOLLOW], input=given, text=True, capture_output=True, check=False
    )
    assert (0, f"{len(largest)}\n", "") == (done.returncode, done.stdout, done.stderr)


_FOLLOW = """
import json, sys, threading
from llguidance import LLMatcher, LLTokenizer
from shared.grammar import library_form, parser_limits
from shared.wire import Grammar

def follow(grammars):
    for grammar in grammars:
        form = library_form(grammar)
        LLMatcher.validate_grammar(form, limits=parser_limits())
        LLMatcher(LLTokenizer("byte"), form, log_level=0, limits=parser_limits()).compute_bitmask()
    print(len(grammars))

threading.stack_size(2 << 20)
grammars = [Grammar.model_validate(given) for given in json.load(sys.stdin)]
thread = threading.Thread(target=follow, args=(grammars,))
thread.start()
thread.join()
"""


def _layers(num_layers: int, width: int) -> str:
    """Rules of an ordinary language: layers that lead to the next two, and back to the first in brackets."""
    lines = ["start: r0_0", "%ignore /[ \\t]+/"]
    for i in range(num_layers):
        for j in range(width):
            below = (
                f"r{i + 1}_{j} | r{i + 1}_{(j + 1) % width}" if i + 1 < num_layers else 'NAME | "(" r0_0 ")"'
            )
            lines.append(f'r{i}_{j}: ({below} ("+" NAME)*)? // layer "{i}')
    return "\n".join([*lines, "NAME: /[a-z\\/]+/i"])


ORDINARY: dict[str, tuple[str, str]] = {
    "regex": ("regex", "(a|b)*" * 1000),
    "choices": ("lark", "start: " + " | ".join(f'"choice {i}"' for i in range(4096))),
    "500 rules, 30 deep": ("lark", _layers(30, 17).replace(' | "(" r0_0 ")"', "")),
    "100 rules that all lead to each other": ("lark", _layers(10, 10)),
    "notation": (
        "lark",
        (
            '%llguidance {}\n?start[capture="a", max_tokens=5]: A -> b | <[1-5]>\n | %regex {"substring_words":"a"}'
            ' "x".."z"~2..3 \r\n\n|"\\u0041"i?_b{2,}\n# "\n_b: %lark {\nstart: /\\//\n}\nA: ~/a/ & /b/s\n'
        ),
    ),
    "2,000 properties": (
        "json_schema",
        json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}),
    ),
    "a model of models": (
        "json_schema",
        json.dumps(
            {
                "$id": "https://example.com/tree",
                "$ref": "#/$defs/m0",
                "$defs": {
                    f"m{i}": {
                        "type": "object",
                        "properties": {
                            "next": {"anyOf": [{"$ref": f"#/$defs/m{(i + 1) % 60}"}, {"type": "null"}]},
                            "all": {"type": "array", "items": {"$ref": "#/$defs/m0"}},
                        },
                    }
                    for i in range(60)
                },
            }
        ),
    ),
    "an unknown $ref": ("json_schema", '{"$ref": "#/$defs/none", "properties": {"$ref": {"$ref": "#"}}}'),
}


@pytest.mark.parametrize(("kind", "text"), ORDINARY.values(), ids=ORDINARY)
def test_ordinary_grammars_pass(kind: str, text: str) -> None:
    """However many rules, alternatives or properties they have."""
    assert None is too_deep(_grammar(kind, text))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lark", 'start: "a'),
        ("lark", "start: %json {"),
        ("lark", "start: %json " + "[" * 50_000),
        ("lark", "start: <a b>"),
        ("json_schema", "{"),
        ("json_schema", "[" * 50_000),
    ],
)
def test_what_cannot_be_read_is_refused(kind: str, text: str) -> None:
    """What is read otherwise than the library reads it could hide a link."""
    assert too_deep(_grammar(kind, text)) is not None


@pytest.mark.parametrize(
    ("links", "longest"),
    [
        ({}, 0),
        ({"a": {"b": 1, "c": 5}, "b": {"d": 7}, "c": {"d": 2}}, 8),
        ({"a": {"a": 3, "b": 1}}, 4),
        ({"a": {"b": 2, "z": 9}, "b": {"c": 1, "a": 3}, "c": {"a": 1, "y": 4}, "y": {"z": 1}}, 2 + 3 + 1 + 9),
    ],
)
def test_the_longest_way(links: dict[object, dict[object, int]], longest: int) -> None:
    """Exact without cycles; nodes of a cycle count as if all were passed."""
    assert longest == longest_way(links)


@pytest.mark.parametrize(
    ("kind", "unit"),
    [("lark", "a:b\n"), ("lark", '"?'), ("json_schema", '{"$ref":"#/0"},'), ("lark", "a b\na:")],
)
def test_the_check_is_quick_at_any_size(kind: str, unit: str) -> None:
    """Linear: the longest text takes a second or less, here with room for a busy machine."""
    text = (unit * (MAX_GRAMMAR_CHARS // len(unit)))[: MAX_GRAMMAR_CHARS - 9]
    began = time.monotonic()
    too_deep(_grammar(kind, f"[{text.rpartition(',')[0]}]" if kind == "json_schema" else text))
    assert time.monotonic() - began < 10


def test_the_limits_are_told() -> None:
    """With the number, so that the client can do something about it."""
    assert f"its references lead more than {MAX_LEVELS} levels deep" == too_deep(_lark("@")(MAX_LEVELS + 1))
    assert f"it names more than {MAX_NAMES} properties" == too_deep(_required(MAX_NAMES + 1))
