"""Bodies of /v1/responses: what is repeated in the answer can be written there."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from router.openai.response_request import parse_response
from router.openai.shared_fields import Limits
from shared.errors import InvalidRequest

TOOL = {"type": "function", "name": "f"}


def nested(depth: int) -> Any:
    """Objects in objects."""
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("metadata", {"metadata": nested(300)}),
        ("user", {"user": nested(300)}),
        ("text", {"text": {"format": {"type": "text"}, "x": nested(300)}}),
        ("tools", {"tools": [TOOL | {"x": nested(300)}]}),
        (
            "tool_choice",
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [TOOL],
                    "x": nested(300),
                },
            },
        ),
    ],
)
def test_what_could_not_be_repeated_is_refused(param: str, fields: dict[str, Any]) -> None:
    """Once it was a 500, after the whole answer had been made."""
    with pytest.raises(InvalidRequest, match="nested too deeply") as refused:
        parse_response(json.dumps({"input": "hi"} | fields).encode(), Limits())
    assert param == refused.value.param


def test_what_is_accepted_fits_into_an_event() -> None:
    """At whatever depth that is."""
    accepted = 0
    for depth in range(245, 260):
        body = json.dumps({"input": "hi", "metadata": nested(depth)}).encode()
        try:
            told = parse_response(body, Limits()).told
        except InvalidRequest:
            continue
        orjson.dumps({"type": "response.completed", "response": told})
        accepted += 1
    assert 0 < accepted < 15
