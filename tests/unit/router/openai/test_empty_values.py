"""What an empty value means: nothing, in every field that can be empty at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS, RESPONSE_FIELDS, Field
from router.openai.requests import parse_chat, parse_completion
from router.openai.response_request import parse_response
from router.openai.shared_fields import Limits
from shared.errors import InvalidRequest

SCALARS = {
    *("n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "seed"),
    *("temperature", "top_p", "top_k", "min_p", "logprobs", "top_logprobs", "truncate_prompt_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos", "stream", "echo"),
    *("return_token_ids", "return_tokens_as_token_ids", "skip_special_tokens", "add_special_tokens"),
    *("include_stop_str_in_output", "add_generation_prompt", "continue_final_message", "parallel_tool_calls"),
}
ENDPOINTS: dict[str, tuple[Any, tuple[Field, ...], dict[str, Any]]] = {
    "completions": (parse_completion, COMPLETION_FIELDS, {"prompt": "x"}),
    "chat": (parse_chat, CHAT_FIELDS, {"messages": [{"role": "user", "content": "x"}]}),
    "responses": (parse_response, RESPONSE_FIELDS, {"input": "x"}),
}


def kind_of(endpoint: str, field: Field) -> str:
    """What an empty value of this field is."""
    if field.name in ENDPOINTS[endpoint][2]:
        return "needed"
    return "scalar" if field.status == "supported" and field.name in SCALARS else "nothing"


def cases(*kinds: str) -> list[Any]:
    """Endpoint, field and each empty value."""
    odd = {("guided_json", "{}"), ("input", '""')}  # a schema, and a turn without words
    return [
        pytest.param(endpoint, field.name, json.loads(empty), id=f"{endpoint}-{field.name}-{empty}")
        for endpoint, (_, table, _) in ENDPOINTS.items()
        for field in table
        for empty in ('""', "[]", "{}")
        if kind_of(endpoint, field) in kinds and (field.name, empty) not in odd
    ]


def parsed(endpoint: str, **changes: Any) -> Any:
    """The request of a body, which is valid without `changes`."""
    parse, _, body = ENDPOINTS[endpoint]
    return parse(json.dumps(body | changes).encode(), Limits())


@pytest.mark.parametrize(("endpoint", "name", "empty"), cases("nothing"))
def test_empty_equals_missing(endpoint: str, name: str, empty: Any) -> None:
    """In every field of the tables that is a list, a text or an object."""
    assert parsed(endpoint) == parsed(endpoint, **{name: empty})


@pytest.mark.parametrize(("endpoint", "name", "empty"), cases("scalar", "needed"))
def test_what_is_needed_and_what_is_a_number_cannot_be_empty(endpoint: str, name: str, empty: Any) -> None:
    """It is refused by name."""
    with pytest.raises(InvalidRequest) as caught:
        parsed(endpoint, **{name: empty})
    assert name == caught.value.param


def test_an_empty_schema_is_any_json() -> None:
    """It asks for something: for JSON."""
    assert parsed("chat", guided_json={}).constraint is not None


@pytest.mark.parametrize("text", [{}, [], "", {"format": {}}, {"format": None}])
def test_an_empty_text_of_responses_is_plain(text: Any) -> None:
    """As is an empty format in it."""
    assert parsed("responses", text=text).constraint is None
