"""A ServingError in each of its shapes: OpenAI error body, server-sent event, `shared.wire.ErrorBody`.

Pure conversions; who catches what is `shared.asgi.handlers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from shared.asgi.text import clipped, one_line_json
from shared.errors import (
    BackendError,
    InvalidRequest,
    NotKept,
    Overloaded,
    ServingError,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnknownModel,
    error_table,
)
from shared.wire import ErrorBody

MAX_MESSAGE_CHARS = 1000
_TYPES: Mapping[type[ServingError], str] = {
    InvalidRequest: "invalid_request_error",
    Unauthorized: "authentication_error",
    UnknownModel: "not_found_error",
    NotKept: "not_found_error",
    TooLarge: "invalid_request_error",
    Unavailable: "server_error",
    Overloaded: "rate_limit_error",
    ServingError: "server_error",
}


def error_type(cls: type[ServingError]) -> str:
    """OpenAI's `error.type` of a class: its own, or that of its nearest ancestor that has one."""
    return next(_TYPES[base] for base in cls.__mro__ if base in _TYPES)


def error_object(exc: ServingError) -> dict[str, Any]:
    """The whole OpenAI body, `{"error": {message, type, param, code}}`."""
    return _openai_body(exc.message, error_type(type(exc)), exc.param, exc.code)


def error_response(exc: ServingError) -> Response:
    """The answer to a request that ended in `exc` before its first byte was sent."""
    headers: dict[str, str] = {}
    if exc.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(exc.retry_after_s)))
    if isinstance(exc, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return json_response(error_object(exc), exc.http_status, headers)


def status_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """The answer for an HTTP status that no ServingError stands for, such as 404 and 405 of the routing."""
    kind = {401: "authentication_error", 404: "not_found_error"}.get(status)
    if kind is None:
        kind = "server_error" if status >= 500 else "invalid_request_error"
    code = {404: "not_found", 405: "method_not_allowed"}.get(status)
    return json_response(_openai_body(message, kind, None, code), status, headers)


def error_event(exc: ServingError) -> bytes:
    """The one server-sent event that ends a stream which failed after its first byte."""
    return b"data: " + one_line_json(error_object(exc)) + b"\n\n"


def error_line(exc: ServingError) -> bytes:
    """The one NDJSON line that ends an internal stream: the `error` event of both kinds in shared.wire."""
    return b'{"error":' + to_error_body(exc).to_json() + b"}\n"


def to_error_body(exc: ServingError) -> ErrorBody:
    """`exc` for another of our processes."""
    return ErrorBody(
        code=exc.code,
        message=clipped(exc.message, MAX_MESSAGE_CHARS),
        param=exc.param,
        retry_after_s=exc.retry_after_s,
    )


def from_error_body(body: ErrorBody) -> ServingError:
    """The exception another process meant; BackendError if it uses a code that this version does not know."""
    cls = error_table().get(body.code, BackendError)
    return cls(body.message, param=body.param, retry_after_s=body.retry_after_s)


def from_error_response(status: int, body: bytes, *, retry_after: str | None = None) -> ServingError:
    """The exception in a worker's non-200 answer; BackendError if the answer is not of our making.

    retry_after: its Retry-After header, which is only believed as a number of seconds.
    """
    wait_s = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
    try:
        error = orjson.loads(body)["error"]
        return from_error_body(
            ErrorBody(
                code=error["code"], message=error["message"], param=error.get("param"), retry_after_s=wait_s
            )
        )
    except (ValueError, TypeError, LookupError, AttributeError):
        return BackendError(f"A worker answered with status {status}.", retry_after_s=wait_s)


def json_response(body: object, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """`body` as application/json."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def _openai_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    shown = None if param is None else clipped(param, 100)
    return {
        "error": {"message": clipped(message, MAX_MESSAGE_CHARS), "type": kind, "param": shown, "code": code}
    }
