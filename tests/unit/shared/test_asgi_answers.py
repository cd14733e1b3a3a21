"""Errors in their shapes: OpenAI body, event, line, and back again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.asgi.answers import (
    error_event,
    error_line,
    error_object,
    error_response,
    from_error_body,
    from_error_response,
    status_response,
    to_error_body,
)
from shared.errors import (
    BackendError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    ServingError,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnknownModel,
    error_table,
)
from shared.wire import DecodeEvent, ErrorBody, PrefillEvent


def _error(body: bytes | memoryview) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(bytes(body))
    assert ["error"] == list(parsed)
    error: dict[str, Any] = parsed["error"]
    assert {"message", "type", "param", "code"} == set(error)
    return error


@pytest.mark.parametrize("cls", error_table().values(), ids=lambda cls: cls.code)
def test_every_class_answers_in_the_openai_shape(cls: type[ServingError]) -> None:
    """Status and code are the class's, and the content type is JSON."""
    response = error_response(cls("It failed.", param="model"))
    error = _error(response.body)
    assert cls.http_status == response.status_code
    assert ("It failed.", "model", cls.code) == (error["message"], error["param"], error["code"])
    assert error["type"].endswith("_error")
    assert "application/json" == response.headers["content-type"]


@pytest.mark.parametrize(
    ("exc", "kind"),
    [
        (InvalidRequest("x"), "invalid_request_error"),
        (PromptTooLong("x"), "invalid_request_error"),
        (TooLarge("x"), "invalid_request_error"),
        (Unauthorized("x"), "authentication_error"),
        (UnknownModel("x"), "not_found_error"),
        (Overloaded("x"), "rate_limit_error"),
        (Unavailable("x"), "server_error"),
        (BackendError("x"), "server_error"),
    ],
)
def test_types_are_those_that_clients_know(exc: ServingError, kind: str) -> None:
    """Client libraries choose their exception by them."""
    assert kind == error_object(exc)["error"]["type"]


@pytest.mark.parametrize(
    ("wait_s", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (30.0, "30")]
)
def test_retry_after_is_rounded_up_to_whole_seconds(wait_s: float, header: str) -> None:
    """Zero would invite a storm of retries."""
    assert header == error_response(Overloaded("full", retry_after_s=wait_s)).headers["retry-after"]


def test_headers_only_where_they_belong() -> None:
    """No Retry-After without a time, and WWW-Authenticate on 401 alone."""
    assert "retry-after" not in error_response(Overloaded("full")).headers
    assert "Bearer" == error_response(Unauthorized("no")).headers["www-authenticate"]
    assert "www-authenticate" not in error_response(InvalidRequest("no")).headers


def test_text_that_cannot_be_sent_or_is_endless_is_cut() -> None:
    """A lone surrogate or a megabyte of message never turns an error into another one."""
    error = _error(error_response(InvalidRequest("\ud800" + "x" * 10**6, param="p" * 1000)).body)
    assert len(error["message"]) <= 1000
    assert len(error["param"]) <= 100


def test_plain_statuses_have_the_same_shape() -> None:
    """404 and 405 of the routing look like every other error, and keep their headers."""
    response = status_response(405, "no", {"Allow": "GET"})
    assert ("invalid_request_error", "method_not_allowed") == (
        _error(response.body)["type"],
        _error(response.body)["code"],
    )
    assert "GET" == response.headers["allow"]
    assert "not_found_error" == _error(status_response(404, "no").body)["type"]
    assert "server_error" == _error(status_response(503, "no").body)["type"]


def test_an_event_is_one_data_line() -> None:
    """Even a message with line ends stays one server-sent event."""
    event = error_event(BackendError("a\n\nb"))
    assert event.startswith(b"data: ")
    assert 1 == event.count(b"\n\n")
    assert event.endswith(b"\n\n")
    assert "a\n\nb" == _error(event.removeprefix(b"data: ").strip())["message"]


def test_a_line_is_an_event_of_both_protocols() -> None:
    """The router reads it with the same models as every other line."""
    line = error_line(Overloaded("full\n", retry_after_s=2.0))
    assert 1 == line.count(b"\n")
    expected = ErrorBody(code="overloaded", message="full\n", retry_after_s=2.0)
    assert expected == DecodeEvent.model_validate_json(line).error
    assert expected == PrefillEvent.model_validate_json(line).error


@pytest.mark.parametrize("cls", error_table().values(), ids=lambda cls: cls.code)
def test_an_error_survives_the_way_between_processes(cls: type[ServingError]) -> None:
    """Class, message, field and waiting time arrive, as a body and as an HTTP answer."""
    sent = cls("It failed.", param="n", retry_after_s=3.0)
    response = error_response(sent)
    for got in (
        from_error_body(to_error_body(sent)),
        from_error_response(
            response.status_code, bytes(response.body), retry_after=response.headers["retry-after"]
        ),
    ):
        assert cls is type(got)
        assert ("It failed.", "n", 3.0) == (got.message, got.param, got.retry_after_s)


def test_a_code_of_another_version_is_a_backend_error() -> None:
    """An unknown code is never an exception of the reader."""
    got = from_error_body(ErrorBody(code="from_the_future", message="m"))
    assert (BackendError, "m") == (type(got), got.message)


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"{}", b'{"error":"x"}', b'{"error":{"code":1}}', b"\xff", b'{"error":null}'],
)
def test_an_answer_that_is_not_ours_is_a_backend_error(body: bytes) -> None:
    """Only its status is told, none of its text."""
    got = from_error_response(500, body, retry_after="Wed, 21 Oct 2015 07:28:00 GMT")
    assert (BackendError, "A worker answered with status 500.", None) == (
        type(got),
        got.message,
        got.retry_after_s,
    )
