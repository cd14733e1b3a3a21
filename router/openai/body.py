"""A request body as a JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from shared.errors import InvalidRequest


@contextmanager
def refuse_deep() -> Iterator[None]:
    """What Python cannot walk through is refused: within are parsing a request and all work on its values."""
    try:
        yield
    except RecursionError as exc:
        raise InvalidRequest("the body is nested too deeply") from exc


def parse_body(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises InvalidRequest."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise InvalidRequest(f"the body is not valid JSON: {exc.msg}") from exc
    if not isinstance(content, dict):
        raise InvalidRequest("the body must be a JSON object")
    return content
