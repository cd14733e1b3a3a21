"""What is asked of an answer's form: wrong values are 400 with the field's name, right ones are one grammar."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from router.openai.form import Form, FormBuilder
from router.openai.requests import parse_chat, parse_completion
from router.openai.shared_fields import Limits
from shared.errors import InvalidRequest
from shared.grammar import problem
from shared.wire import MAX_GRAMMAR_CHARS

HI = [{"role": "user", "content": "hi"}]
OBJECT = {"type": "object"}
MARKS = ("<tool_call>", "</tool_call>", "<|im_end|>")


def nested(depth: int) -> dict[str, Any]:
    """A schema of arrays in arrays."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    """A function as clients send it."""
    return {"type": "function", "function": {"name": name, **function}}


def form(**fields: Any) -> Form:
    """The form of a chat's answer."""
    body = json.dumps({"messages": HI} | fields).encode()
    return FormBuilder(MARKS).build(parse_chat(body, Limits()))


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    """A response_format with a schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("response_format", {"response_format": "json"}),
        ("response_format.type", {"response_format": {"type": None}}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format.json_schema.name",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT}}},
        ),
        ("response_format.json_schema.schema", {"response_format": schema_format(None)}),
        ("response_format.json_schema.schema", {"response_format": schema_format({"type": "wat"})}),
        ("response_format.json_schema.schema", {"response_format": schema_format({"not": OBJECT})}),
        ("response_format.json_schema.strict", {"response_format": schema_format(OBJECT, strict="yes")}),
        ("guided_json", {"guided_json": "{"}),
        ("guided_json", {"guided_json": 5}),
        ("guided_json", {"guided_json": {"type": "integer", "minimum": 2, "maximum": 1}}),
        ("guided_json", {"guided_json": nested(200)}),
        ("guided_json", {"guided_json": nested(400)}),
        ("guided_grammar", {"guided_grammar": "(" * (MAX_GRAMMAR_CHARS + 1)}),
        ("tools", {"tools": [tool(x=nested(400))]}),
        ("guided_regex", {"guided_regex": "(a"}),
        ("guided_regex", {"guided_regex": ["a"]}),
        ("guided_regex", {"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)}),
        ("guided_choice", {"guided_choice": {"a": 1}}),
        ("guided_choice", {"guided_choice": "yes"}),
        ("guided_choice", {"guided_choice": ["yes", ""]}),
        ("guided_choice", {"guided_choice": [1]}),
        ("guided_grammar", {"guided_grammar": "start: missing"}),
        ("guided_grammar", {"guided_grammar": 5}),
        ("structured_outputs", {"structured_outputs": "json"}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "(a"}}),
        ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "x"}}),
        ("guided_regex", {"response_format": {"type": "json_object"}, "guided_regex": "a"}),
        ("tools", {"tools": {"a": 1}}),
        ("tools[0]", {"tools": ["f"]}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[0].function.name", {"tools": [tool("a b")]}),
        ("tools[1].function.name", {"tools": [tool(), tool("")]}),
        ("tools[0].function.strict", {"tools": [tool(strict=1)]}),
        ("tools[0].function.parameters", {"tools": [tool(parameters=[])]}),
        ("tools[0].function.parameters.type", {"tools": [tool(parameters={"type": "string"})]}),
        ("tools[0].function.parameters", {"tools": [tool(parameters={"not": OBJECT}, strict=True)]}),
        ("tools", {"tools": [tool(), tool()]}),
        ("tool_choice", {"tools": [tool()], "tool_choice": "any"}),
        ("tool_choice", {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
        ("tool_choice.type", {"tools": [tool()], "tool_choice": {"type": "x"}}),
        ("tool_choice.function.name", {"tools": [tool()], "tool_choice": {"type": "function"}}),
        ("tool_choice.allowed_tools", {"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [], "tool_choice": "required"}),
        ("guided_choice", {"tools": [tool()], "guided_choice": ["a"]}),
    ],
)
def test_wrong_values_are_named(param: str, fields: dict[str, Any]) -> None:
    """Each is refused before anything is sent to a worker."""
    with pytest.raises(InvalidRequest) as caught:
        form(**fields)

    assert param == caught.value.param
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "tools": None, "tool_choice": None, "structured_outputs": None},
        {"tools": []},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tools": [tool()], "tool_choice": "none"},
    ],
)
def test_a_free_answer_has_no_grammar(fields: dict[str, Any]) -> None:
    """null and empty values ask for nothing."""
    assert Form() == form(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": schema_format(OBJECT, strict=True, description="d")},
        {"response_format": schema_format({"type": "array", "uniqueItems": True}, strict=False)},
        {"guided_json": OBJECT},
        {"guided_json": nested(50)},
        {"guided_json": json.dumps(OBJECT)},
        {"guided_regex": r"^\d{3}-/x$"},
        {"guided_choice": ["yes", "no", 'quo"te', "é\\n"]},
        {"guided_grammar": 'root ::= "a" | "b" root'},
        {"guided_grammar": 'start: "a" start | "b"'},
        {"structured_outputs": {"json": OBJECT}},
        {"structured_outputs": {"json_object": True, "regex": None}},
        {"structured_outputs": {"choice": ["a"]}},
        {"tools": [tool()]},
        {"tools": [tool(parameters={"properties": {"a": {"type": "array", "uniqueItems": True}}})]},
        {"tools": [tool(), tool("g")], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [tool()], "tool_choice": "auto", "response_format": {"type": "json_object"}},
        {"tools": [tool()], "tool_choice": "required", "guided_choice": ["a"]},
        {"tools": [tool()], "guided_regex": "a/b"},
    ],
)
def test_every_form_is_a_good_grammar(fields: dict[str, Any]) -> None:
    """Of all kinds, alone and together with tools."""
    grammar = form(**fields).grammar

    assert grammar is not None
    assert problem(grammar) is None


def test_a_named_choice_and_allowed_tools_narrow_the_calls() -> None:
    """Only what may be called is in the grammar, though the prompt has all tools."""
    tools = [tool("f"), tool("g"), tool("h")]
    named = {"type": "function", "function": {"name": "g"}}
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [tool("h"), tool("f")]},
    }

    assert ("g",) == form(tools=tools, tool_choice=named).tool_names
    assert ("h", "f") == form(tools=tools, tool_choice=allowed).tool_names


def test_completions_take_forms_too() -> None:
    """guided_* and response_format are not of chats alone."""
    body = json.dumps({"prompt": "x", "guided_choice": ["a"]}).encode()

    assert FormBuilder(MARKS).build(parse_completion(body, Limits())).grammar is not None


@pytest.mark.parametrize(
    ("mark", "param", "fields"),
    [
        ("<|im_end|>", "guided_choice", {"guided_choice": ["<|im_end|>"]}),
        ("<|im_end|>", "guided_choice", {"guided_choice": ["no", "yes<|im_end|>."]}),
        (
            "<tool_call>",
            "structured_outputs.choice",
            {"structured_outputs": {"choice": ["a", "<tool_call>"]}},
        ),
    ],
)
def test_a_choice_that_spells_a_token_is_refused(mark: str, param: str, fields: dict[str, Any]) -> None:
    """It was generated as that token: the answer was empty, or broke, instead of that text."""
    with pytest.raises(InvalidRequest, match=re.escape(f"'{mark}'")) as caught:
        form(**fields)

    assert param == caught.value.param


def test_a_choice_may_look_like_a_token() -> None:
    """Parts of a mark, or its name alone, are just text."""
    assert form(guided_choice=["<|im_", "end|>", "im_end", "tool_call"]).grammar is not None


def test_options_for_the_library_in_a_client_s_schema_are_not_taken() -> None:
    """White space stays bounded."""
    grammar = form(guided_json={"type": "object", "x-guidance": {"whitespace_flexible": True}}).grammar

    assert grammar is not None
    assert "whitespace_flexible" not in grammar.text


@pytest.mark.parametrize("code", [*range(0x21), *range(0x7E, 0xA1), 0x2028, 0xFEFF, 0x1F600])
def test_choices_may_hold_any_character(code: int) -> None:
    """Written so that the grammar's lexer takes it: U+007F was once a 400."""
    grammar = form(guided_choice=[f"a{chr(code)}b"]).grammar
    assert grammar is not None
    assert problem(grammar) is None
