"""docs/openai.md says what the code does with every field, and knows every field of the official client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from router.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS, RESPONSE_FIELDS, Field, markdown

PAGE = Path(__file__).parents[4] / "docs" / "openai.md"
TABLES = {"completions": COMPLETION_FIELDS, "chat": CHAT_FIELDS, "responses": RESPONSE_FIELDS}


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_tables_of_the_code(name: str) -> None:
    """Between the marks stands exactly what the tables say; print it with `markdown`."""
    content = PAGE.read_text().split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]

    assert markdown(TABLES[name]) == content.strip()


@pytest.mark.parametrize(
    ("params", "table"),
    [
        (completion_create_params.CompletionCreateParamsBase, COMPLETION_FIELDS),
        (chat_params.CompletionCreateParamsBase, CHAT_FIELDS),
        (response_create_params.ResponseCreateParamsBase, RESPONSE_FIELDS),
    ],
    ids=list(TABLES),
)
def test_every_field_of_the_official_client_is_decided(params: Any, table: tuple[Field, ...]) -> None:
    """None of them is unknown here: each is supported, ignored or refused on purpose."""
    known = {field.name for field in table}

    assert set() == set(params.__annotations__) - known
    assert len(known) == len(table), "a field is listed twice"
