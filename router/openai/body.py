"""A request body as a JSON object."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from router.openai import exact_json
from shared.errors import InvalidRequest

_OBJECT_ARGUMENTS = re.compile(rb'"arguments"\s*:\s*\{')


@contextmanager
def refuse_deep() -> Iterator[None]:
    """What Python cannot walk through is refused: within are parsing a request and all work on its values."""
    try:
        yield
    except RecursionError as exc:
        raise InvalidRequest("the body is nested too deeply") from exc


def parse_body(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises InvalidRequest.

    Where a tool call's arguments may be an object instead of text, as nearly nobody sends them, the numbers in
    the conversation keep their digits as well: that body is read a second time, by a slower reader.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise InvalidRequest(f"the body is not valid JSON: {exc.msg}") from exc
    if not isinstance(content, dict):
        raise InvalidRequest("the body must be a JSON object")
    if _OBJECT_ARGUMENTS.search(body):
        try:
            exact = exact_json.loads(body.decode())
        except ValueError as exc:
            raise InvalidRequest("the body is nested too deeply") from exc
        content |= {key: exact[key] for key in ("messages", "input") if key in exact}
    return content
