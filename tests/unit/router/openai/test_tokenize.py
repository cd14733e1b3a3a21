"""Bodies of /tokenize: a prompt, or what a chat has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.openai.requests import parse_completion
from router.openai.resolve import Resolver
from router.openai.shared_fields import Limits
from router.openai.tokenize import TokenizerApi
from router.text.template import ChatTemplate
from router.text.tokenizer import TextTokenizer
from shared.errors import InvalidRequest
from shared.models.facts import ModelFacts

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def api(parts: tuple[TextTokenizer, ChatTemplate], facts: ModelFacts) -> TokenizerApi:
    """Of the tiny tokenizer."""
    return TokenizerApi(parts[0], Resolver(*parts), facts)


def tokens(api: TokenizerApi, **body: Any) -> Any:
    """What the answer has."""
    return api.tokenize(json.dumps(body).encode(), 4096)[1]["tokens"]


def test_null_equals_missing(api: TokenizerApi) -> None:
    """Clients that write out every field send both, one of them null: it was a 400."""
    prompt, chat = tokens(api, prompt="hi"), tokens(api, messages=HI)
    assert prompt != chat
    assert prompt == tokens(api, prompt="hi", messages=None)
    assert prompt == tokens(api, prompt="hi", messages=[])
    assert chat == tokens(api, prompt=None, messages=HI)


@pytest.mark.parametrize("body", [{}, {"prompt": None, "messages": None}, {"messages": []}])
def test_one_of_both_is_needed(api: TokenizerApi, body: dict[str, Any]) -> None:
    """Else there is nothing to count."""
    with pytest.raises(InvalidRequest, match="prompt or messages is needed"):
        tokens(api, **body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "first", "prompt": "last"}',
        b'{"prompt": "last", "other": {"a": 1, "a": 2}}',
        b'{"prompt": "last", "other": 1e999}',
        b"",
        b"[]",
    ],
)
def test_a_body_is_read_as_it_is_elsewhere(api: TokenizerApi, body: bytes) -> None:
    """It had a reader of its own, which refused a name that an object has twice; elsewhere the last one counts."""
    outcomes: list[Any] = []
    for read in (
        lambda: parse_completion(body, Limits()).prompt,
        lambda: [
            api.detokenize(json.dumps({"tokens": api.tokenize(body, 9)[1]["tokens"]}).encode())[1]["prompt"]
        ],
    ):
        try:
            outcomes.append(read())
        except InvalidRequest as exc:
            outcomes.append(exc.message)

    assert outcomes[0] == outcomes[1]
    assert "first" not in outcomes
