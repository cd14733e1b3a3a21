"""Numbers of JSON keep their spelling on the way through Python."""

from __future__ import annotations

import json
from math import isfinite

import pytest

from router.openai import exact_json
from router.openai.requests import parse_chat
from router.openai.response_request import parse_response
from router.openai.shared_fields import Limits
from router.text.template import ChatTemplate

SPELLINGS = [
    "0",
    "-0",
    "7",
    "1.5",
    "1.10",
    "1e2",
    "1E+400",
    "-2.50e-7",
    "0.1000000000000000055511151231257827",
    "18446744073709551616",
    "123456789012345678901234567890",
    "9" * 6000,
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_numbers_are_written_as_they_were_read(spelling: str) -> None:
    """By the template's own filter, as part of any structure, and where a template writes a value as it is."""
    template = ChatTemplate({"default": "{{ messages[0] | tojson }}|{{ messages[0].x[0].y }}"})
    value = exact_json.loads(f'{{"x": [{{"y": {spelling}, "z": "{spelling}"}}]}}')

    assert f'{{"x": [{{"y": {spelling}, "z": "{spelling}"}}]}}|{spelling}' == template.render([value])


def test_a_long_list_of_spelled_numbers_is_written_at_once() -> None:
    """Each number once cost a pass over the whole text: such a request held its thread for an hour."""
    text = f"[{', '.join(f'{number}.10' for number in range(100_000))}]"

    assert text == ChatTemplate({"default": "{{ messages[0] | tojson }}"}).render([exact_json.loads(text)])


@pytest.mark.parametrize("spelling", [spelling for spelling in SPELLINGS if isfinite(float(spelling))])
def test_arguments_given_as_an_object_keep_their_numbers_too(spelling: str) -> None:
    """As those given as text: the body's ordinary reader would make floats of them."""
    call = f'{{"function": {{"name": "f", "arguments" : {{"x": {spelling}}}}}}}'
    turn = f'{{"role": "assistant", "content": null, "tool_calls": [{call}]}}'
    item = f'{{"type": "function_call", "call_id": "c", "name": "f", "arguments":{{"x": {spelling}}}}}'
    template = ChatTemplate({"default": "{{ messages[0].tool_calls[0].function.arguments | tojson }}"})

    for request in (
        parse_chat(f'{{"messages": [{turn}]}}'.encode(), Limits()),
        parse_response(f'{{"input": [{item}]}}'.encode(), Limits()),
    ):
        assert f'{{"x": {spelling}}}' == template.render(request.messages)


def test_ordinary_values_are_python_s_own() -> None:
    """What loses nothing stays plain, for templates that compute with it."""
    text = '{"a": [1, -2.5, true, null, "é"], "b": {}}'
    value = exact_json.loads(text)

    assert json.loads(text) == value
    assert [int, float, bool, type(None), str] == [type(item) for item in value["a"]]


@pytest.mark.parametrize(
    "text", ["", "nope", "NaN", "[Infinity]", "{'a': 1}", '{"a": 01}', "[" * 100_000, r'["\ud800"]']
)
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    """Also what only Python's own reader would take, and what nobody can walk through."""
    with pytest.raises(ValueError, match=r"\S"):
        exact_json.loads(text)
