"""pydantic's findings about a request, as one sentence for its sender."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from shared.asgi.text import clipped
from shared.errors import InvalidRequest

MAX_NAME_CHARS = 100
MAX_REASON_CHARS = 300


def invalid_request(exc: ValidationError, payload: object) -> InvalidRequest:
    """The first finding of `exc` about `payload`, the parsed body that was validated."""
    return describe(exc.errors(include_url=False, include_context=False, include_input=False), payload)


def describe(findings: Sequence[Any], payload: object) -> InvalidRequest:
    """The first of pydantic's `findings` as an error with `param`; never shows the offending value."""
    if not findings:
        return InvalidRequest("The request is invalid.")
    first = findings[0]
    kind, name = str(first["type"]), clipped(field_name(first["loc"], payload), MAX_NAME_CHARS)
    if kind == "missing":
        return InvalidRequest(f"'{name}' is required.", param=name or None)
    if kind == "extra_forbidden":
        return InvalidRequest(f"'{name}' is not a known field.", param=name or None)
    reason = clipped(str(first["msg"]).removeprefix("Value error, ").rstrip("."), MAX_REASON_CHARS)
    if not name:
        return InvalidRequest(f"The request is invalid: {reason}.")
    reason = reason.replace("Input should", "it should", 1)
    return InvalidRequest(f"'{name}' is invalid: {reason}.", param=name)


def field_name(loc: Sequence[str | int], payload: object) -> str:
    """`loc` as a dotted path into `payload`.

    pydantic puts the names of union members between real keys (`prompt.list[str].1`); only steps that exist
    in the payload, and a last one that is missing from an object, are kept.
    """
    steps: list[str] = []
    at = payload
    for index, step in enumerate(loc):
        if _has(at, step):
            at = at[step]  # type: ignore[index]
        elif not (isinstance(at, dict) and index == len(loc) - 1):
            continue
        steps.append(str(step))
    return ".".join(steps)


def _has(container: object, step: str | int) -> bool:
    if isinstance(container, list):
        return isinstance(step, int) and 0 <= step < len(container)
    return isinstance(container, dict) and step in container
