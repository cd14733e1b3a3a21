"""pydantic's findings about a request, as one sentence for its sender."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from shared.asgi.text import clipped
from shared.errors import InvalidRequest

M = TypeVar("M", bound=BaseModel)
MAX_NAME_CHARS = 100
MAX_REASON_CHARS = 300


def validated(payload: object, model: type[M]) -> M:
    """A parsed body as a valid `model`. Raises InvalidRequest, with the field at fault in `param`."""
    try:
        return model.model_validate(payload)
    except ValidationError as exc:
        raise invalid_request(exc, payload) from exc


def invalid_request(exc: ValidationError, payload: object) -> InvalidRequest:
    """The most telling finding of `exc` about `payload`, the parsed body that was validated."""
    return describe(exc.errors(include_url=False, include_context=False, include_input=False), payload)


def describe(findings: Sequence[Any], payload: object) -> InvalidRequest:
    """The most telling of pydantic's `findings` as an error with `param`; never shows the offending value.

    For a field of several types there is one finding per type: the one that got furthest into the value knows
    best what was meant (`prompt.1` of a list of texts, not "prompt is no text").
    """
    if not findings:
        return InvalidRequest("The request is invalid.")
    rivals = [finding for finding in findings if finding["loc"][:1] == findings[0]["loc"][:1]]
    names = [field_name(f["loc"], payload, absent=f["type"] == "missing") for f in rivals]
    deepest = max(range(len(names)), key=lambda index: names[index].count("."))
    best, name = rivals[deepest], clipped(names[deepest], MAX_NAME_CHARS)
    kind = str(best["type"])
    if kind == "missing":
        return InvalidRequest(f"'{name}' is required.", param=name or None)
    if kind == "extra_forbidden":
        return InvalidRequest(f"'{name}' is not a known field.", param=name or None)
    reason = clipped(str(best["msg"]).removeprefix("Value error, ").rstrip("."), MAX_REASON_CHARS)
    if not name:
        return InvalidRequest(f"The request is invalid: {reason}.")
    reason = reason.replace("Input should", "it should", 1)
    return InvalidRequest(f"'{name}' is invalid: {reason}.", param=name)


def field_name(loc: Sequence[str | int], payload: object, *, absent: bool = False) -> str:
    """`loc` as a dotted path into `payload`.

    pydantic puts the names of union members between real keys (`prompt.list[str].1`); only steps that exist
    in the payload are kept, and the last one if it is `absent`, the name of a field that should exist.
    """
    steps: list[str] = []
    at = payload
    for index, step in enumerate(loc):
        if _has(at, step):
            at = at[step]  # type: ignore[index]
        elif not (absent and index == len(loc) - 1):
            continue
        steps.append(str(step))
    return ".".join(steps)


def _has(container: object, step: str | int) -> bool:
    if isinstance(container, list):
        return isinstance(step, int) and 0 <= step < len(container)
    return isinstance(container, dict) and step in container
