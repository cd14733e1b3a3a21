"""Chat messages: forms that clients send, and errors that name the place."""

from __future__ import annotations

from typing import Any

import pytest

from router.openai.messages import parse_messages
from shared.errors import InvalidRequest

HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_equal_the_joined_text(role: str) -> None:
    """Parts are joined without a separator, in every role."""
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi"}]

    assert parse_messages([{"role": role, "content": "Say hi"}]) == parse_messages(
        [{"role": role, "content": parts}]
    )


def test_developer_means_system() -> None:
    """The developer role is the system role, wherever it stands."""
    messages = parse_messages([HI, {"role": "system", "content": "a"}, {"role": "developer", "content": "b"}])

    assert ["user", "system", "system"] == [message["role"] for message in messages]


def test_keys_that_no_template_reads_are_left_out() -> None:
    """Only known keys go on."""
    assert parse_messages([{**HI, "name": "Ann"}]) == parse_messages(
        [{**HI, "name": "Ann", "id": 7, "audio": None}]
    )


@pytest.mark.parametrize(
    ("arguments", "decoded"),
    [
        ('{"x": 101}', {"x": 101}),
        ("{}", {}),
        ("", {}),
        (None, {}),
        ("not json", "not json"),
        ({"x": 1}, {"x": 1}),
        ("[1, 2]", [1, 2]),
        ('{"id": 18446744073709551617}', {"id": 2**64 + 1}),
        ("NaN", "NaN"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_tool_arguments_are_decoded(arguments: Any, decoded: Any) -> None:
    """JSON text becomes what it spells, nothing becomes an empty object, other text stays."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = parse_messages([HI, {"role": "assistant", "content": None, "tool_calls": [call]}])[1]

    assert decoded == message["tool_calls"][0]["function"]["arguments"]
    assert message["content"] is None


def test_a_refusal_in_the_history_is_text() -> None:
    """An assistant's refusal is what it said, as a field and as a part."""
    field = {"role": "assistant", "content": None, "refusal": "No."}
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}

    assert ["No.", "No."] == [message["content"] for message in parse_messages([field, part])]


@pytest.mark.parametrize(
    ("place", "messages"),
    [
        ("messages", None),
        ("messages", "hi"),
        ("messages", {}),
        ("messages", []),
        ("messages[0]", ["hi"]),
        ("messages[0].role", [{}]),
        ("messages[0].role", [{"role": "robot", "content": "x"}]),
        ("messages[0].role", [{"role": ["user"], "content": "x"}]),
        ("messages[0].content", [{"role": "user"}]),
        ("messages[0].content", [{"role": "user", "content": None}]),
        ("messages[0].content", [{"role": "user", "content": 5}]),
        ("messages[0].content", [{"role": "user", "content": []}]),
        ("messages[1].content", [HI, {"role": "assistant", "content": None, "tool_calls": []}]),
        ("messages[0].content[0]", [{"role": "user", "content": ["x"]}]),
        ("messages[0].content[0].text", [{"role": "user", "content": [{"type": "text"}]}]),
        (
            "messages[0].content[0].type",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        ),
        ("messages[0].name", [{**HI, "name": 5}]),
        ("messages[0].tool_calls", [{**HI, "tool_calls": [{"function": {"name": "f"}}]}]),
        ("messages[0].function_call", [{**HI, "role": "assistant", "function_call": {"name": "f"}}]),
        ("messages[0].tool_calls", [{"role": "assistant", "tool_calls": "x"}]),
        ("messages[0].tool_calls[0]", [{"role": "assistant", "tool_calls": [5]}]),
        (
            "messages[0].tool_calls[0].function.name",
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
        ),
        (
            "messages[0].tool_calls[0].function.arguments",
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
        ),
    ],
)
def test_malformed_messages_are_refused_by_place(place: str, messages: Any) -> None:
    """The error names the exact place."""
    with pytest.raises(InvalidRequest) as caught:
        parse_messages(messages)
    assert (place, True) == (caught.value.param, place in caught.value.message)


def test_an_empty_text_is_legal() -> None:
    """An empty string is a user's turn, if an odd one."""
    assert "" == parse_messages([{"role": "user", "content": ""}])[0]["content"]
