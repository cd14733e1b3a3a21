"""Workers' complaints as clients read them: with the fields that these sent, and no names of ours."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.openai.blame import in_client_words
from router.openai.requests import parse_chat, parse_completion
from router.openai.response_request import parse_response
from router.openai.shared_fields import Limits
from shared.errors import InvalidRequest, PromptTooLong


def blamed(param: str | None, **body: Any) -> str | None:
    """The field that a completion's client reads, where a worker named `param`."""
    request = parse_completion(json.dumps({"prompt": "Hi", **body}).encode(), Limits())
    return in_client_words(request, None, InvalidRequest("no", param=param)).param


@pytest.mark.parametrize(
    ("param", "body", "expected"),
    [
        ("n", {"n": 100}, "n"),
        ("n", {"best_of": 100}, "best_of"),
        ("n", {"n": 100, "best_of": 100}, "best_of"),
        ("max_tokens", {"max_tokens": 9}, "max_tokens"),
        ("max_tokens", {"max_completion_tokens": 9}, "max_completion_tokens"),
        ("max_tokens", {"max_tokens": 9, "max_completion_tokens": 8}, "max_completion_tokens"),
        ("max_tokens", {"n": 3}, "n"),
        ("max_tokens", {"best_of": 3}, "best_of"),
        ("max_tokens", {}, None),
        ("token_ids", {}, "prompt"),
        ("sampling.seed", {}, None),
        (None, {}, None),
    ],
)
def test_a_field_is_the_clients_own(param: str | None, body: dict[str, Any], expected: str | None) -> None:
    """What it did not send is never blamed: n stood for best_of, and max_tokens for whatever was too much."""
    assert expected == blamed(param, **body)


def test_a_grammar_is_the_field_that_it_came_from() -> None:
    """In the text too; the newer endpoint has names of its own for both."""
    error = InvalidRequest("the grammar cannot be used: why", param="sampling.grammar")
    field = "response_format.json_schema.schema"
    chat = parse_chat(b'{"messages": [{"role": "user", "content": "Hi"}]}', Limits())
    response = parse_response(b'{"input": "Hi"}', Limits())

    told = [in_client_words(request, field, error) for request in (chat, response)]

    assert [field, "text.format.schema"] == [e.param for e in told]
    assert [f"{e.param} cannot be used: why" for e in told] == [e.message for e in told]


def test_the_kind_of_error_stays() -> None:
    """Clients tell a long prompt by its code."""
    request = parse_chat(b'{"messages": [{"role": "user", "content": "Hi"}]}', Limits())

    told = in_client_words(request, None, PromptTooLong("too long", param="token_ids"))

    assert (PromptTooLong, "messages") == (type(told), told.param)
