"""Calls out of text: the same for every way to cut it, nothing of the marks in the content, nothing lost."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.tools_parser import ToolParser

NAMES = ("f", "get_weather")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"</tool_call>", "b": [1, {"c": {}}]}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
BLOCK = '```json\n{\n  "name": "f",\n  "arguments": {"a": "}\\"</tool_call>", "b": [1, {"c": {}}]}\n}\n```'
SECOND_BLOCK = '```json\n{"name": "get_weather", "arguments": {}}\n```'
CALLS = [("f", '{"a": "}\\"</tool_call>", "b": [1, {"c": {}}]}'), ("get_weather", "{}")]


def parse(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and name and arguments of each call."""
    parser = ToolParser(NAMES)
    content = ""
    calls: list[list[str]] = []
    for parsed in [*map(parser.push, pieces), parser.flush()]:
        content += parsed.content
        for call in parsed.calls:
            if call.name is not None:
                assert (call.index, "") == (len(calls), call.arguments)
                assert call.id
                calls.append([call.name, ""])
            else:
                assert call.id is None
                calls[call.index][1] += call.arguments
    return content, [(name, arguments) for name, arguments in calls]


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    """`text` in pieces."""
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)) | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_two_calls_after_text_come_out_however_they_are_cut(data: Any) -> None:
    """Braces, quotes and marks inside strings end nothing."""
    pieces = data.draw(cut(f"Let me see.\n{CALL}\n{SECOND}\n"))

    assert ("Let me see.\n", CALLS) == parse(pieces)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_blocks_of_json_are_calls_too(data: Any) -> None:
    """As coder models write them, after text."""
    pieces = data.draw(cut(f"Let me see.\n{BLOCK}\n{SECOND_BLOCK}\n"))

    assert ("Let me see.\n", CALLS) == parse(pieces)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_an_object_as_the_whole_answer_is_a_call_too(data: Any) -> None:
    """But not one that comes after text."""
    text = BLOCK.removeprefix("```json").removesuffix("```")

    assert ("", CALLS[:1]) == parse(data.draw(cut(text)))
    assert (f"See: {text}", []) == parse(data.draw(cut(f"See: {text}")))


@pytest.mark.parametrize("text", [CALL + SECOND, f"{CALL}\n\n {SECOND}", f"{CALL}\n{SECOND}\n\n"])
def test_white_space_around_calls_is_no_content(text: str) -> None:
    """Between and after them."""
    assert ("", CALLS) == parse(list(text))


@pytest.mark.parametrize(
    "text",
    [
        "no call at all",
        "<tool_call>",
        "<tool_call>x",
        "a < b <tool> <tool_",
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"arguments": {}, "name": "f"}\n</tool_call>',
        '<tool_call>\n{"name": "f"',
        "<tool_call>" + " " * 2000,
        "<tool_call><tool_call>",
        '```json\n{"name": "Bob", "arguments": {}}\n```',
        '```json\n{"name": "f", "args": {}}\n```',
        "```python\nprint(1)\n```",
        '{"name": "Bob", "age": 3}',
        " \n{",
        "</tool_call>",
        "",
    ],
)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_is_no_call_is_content(text: str, data: Any) -> None:
    """To the last character."""
    assert (text, []) == parse(data.draw(cut(text)))


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet='<tool_call>/{}" \nx'), st.data())
def test_any_text_is_the_same_in_one_piece_and_in_many(text: str, data: Any) -> None:
    """No way to cut it changes what is found."""
    assert parse([text]) == parse(data.draw(cut(text)))


def test_text_is_held_only_while_it_can_begin_a_call() -> None:
    """The mark's first characters wait; anything else leaves at once."""
    parser = ToolParser(NAMES)

    assert "a " == parser.push("a <tool").content
    assert "<tools> b" == parser.push("s> b").content


def test_arguments_leave_as_they_come() -> None:
    """A long call is not held to its end, and nothing of its frame leaks."""
    parser = ToolParser(NAMES)
    parser.push('<tool_call>\n{"name": "f", "arguments": ')

    begun = parser.push('{"text": "one')
    more = parser.push(" two")

    assert ["f", None] == [call.name for call in begun.calls]
    assert '{"text": "one' == begun.calls[1].arguments
    assert " two" == more.calls[0].arguments
    assert parser.is_inside_call
    assert [] == parser.flush().calls


def test_ids_differ() -> None:
    """Of the calls of one answer, and of two answers."""
    found = {c.id for _ in range(2) for c in ToolParser(NAMES).push(CALL + SECOND).calls if c.id}

    assert 4 == len(found)


def test_the_first_call_s_arguments_are_json() -> None:
    """The test's own text is what it seems."""
    assert {"a": '}"</tool_call>', "b": [1, {"c": {}}]} == json.loads(CALLS[0][1])


@pytest.mark.parametrize("before", ["", f"{CALL}\n"])
@pytest.mark.parametrize("num_characters", [11, 15, 25, 30])
def test_a_call_that_is_cut_leaks_nothing_of_its_mark(before: str, num_characters: int) -> None:
    """An answer that its length limit ends within a call's head: the raw beginning used to become content."""
    parser = ToolParser(NAMES)
    pieces = [parser.push(before), parser.push(SECOND[:num_characters]), parser.flush(is_cut=True)]

    assert "" == "".join(parsed.content for parsed in pieces)
    assert len(CALLS[:1] if before else []) == parser.num_calls
