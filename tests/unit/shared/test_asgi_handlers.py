"""Every error of an app becomes an answer in one shape: on a real socket."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel

from shared.asgi.context import request_id_of
from shared.errors import Overloaded, PromptTooLong
from tests.support.servers import ServerThread
from tests.unit.shared.conftest import Lines


class Query(BaseModel):
    """A body that FastAPI validates."""

    n: int


def _routes() -> APIRouter:
    app = APIRouter()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.get("/id")
    async def show_id(request: Request) -> dict[str, str]:
        return {"id": request_id_of(request.scope)}

    @app.post("/valid")
    async def valid(query: Query) -> dict[str, int]:
        return {"n": query.n}

    @app.get("/boom")
    async def boom() -> None:
        raise RuntimeError("inner http://10.0.0.1:9/ detail")

    @app.get("/bug")
    async def bug() -> None:
        Query.model_validate({"n": "our own mistake"})

    @app.get("/full")
    async def full() -> None:
        raise Overloaded("No room.", retry_after_s=1.5)

    @app.get("/long")
    async def long() -> None:
        raise PromptTooLong("This model's maximum context length is 8 tokens.")

    @app.get("/teapot")
    async def teapot() -> None:
        raise HTTPException(418, "short and stout")

    return app


@pytest.fixture(scope="module")
def serve(serve_routes: Callable[..., ServerThread]) -> Callable[..., ServerThread]:
    """These routes under given settings."""
    return partial(serve_routes, _routes())


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nowhere", None, 404, "not_found"),
        ("PUT", "/id", None, 405, "method_not_allowed"),
        ("GET", "/teapot", None, 418, None),
        ("GET", "/boom", None, 500, "internal_error"),
        ("GET", "/bug", None, 500, "internal_error"),
        ("GET", "/full", None, 429, "overloaded"),
        ("GET", "/long", None, 400, "context_length_exceeded"),
        ("POST", "/valid", b"{", 400, "invalid_request"),
        ("POST", "/valid", b"[]", 400, "invalid_request"),
        ("POST", "/valid", b"", 400, "invalid_request"),
        ("POST", "/valid", b'{"n":"x"}', 400, "invalid_request"),
    ],
)
def test_every_error_has_the_openai_shape(
    serve: Callable[..., ServerThread],
    lines: Lines,
    method: str,
    path: str,
    body: bytes | None,
    status: int,
    code: str | None,
) -> None:
    """JSON with message, type, param and code, no stack and no inner address, and the server goes on."""
    server = serve()
    headers = {"content-type": "application/json"}
    answer = server.http.request(method, path, content=body, headers=headers)
    assert (status, "application/json") == (answer.status_code, answer.headers["content-type"])
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} == set(error)
    assert code == error["code"]
    for inner in ("Traceback", "10.0.0.1", "RuntimeError", "pydantic", "input_value", "our own mistake"):
        assert inner not in answer.text
    assert 200 == server.http.get("/health").status_code


def test_a_validation_error_of_fastapi_names_its_field(serve: Callable[..., ServerThread]) -> None:
    """As `parse_json` does."""
    error = serve().http.post("/valid", json={"n": "x"}).json()["error"]
    assert "n" == error["param"]
    assert "'n' is invalid: it should be a valid integer" in error["message"]


def test_allow_and_retry_after_are_kept(serve: Callable[..., ServerThread]) -> None:
    """405 says which methods there are, HEAD wherever there is GET; 429 says when to come back."""
    server = serve()
    assert "GET, HEAD" == server.http.put("/id").headers["allow"]
    assert "2" == server.http.get("/full").headers["retry-after"]


def test_an_unexpected_error_is_logged_once_with_its_stack(
    serve: Callable[..., ServerThread], lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    """By us, under the request's id, and not once more by the server."""
    answer = serve().http.get("/boom")
    end = lines.ends.get(timeout=10)
    (line,) = [line for line in lines.all if line["event"] == "unexpected_error"]
    assert answer.headers["x-request-id"] == line["request_id"]
    assert True is line["exc_info"]
    assert ("error", 500) == (end["ending"], end["status"])
    assert [] == [record for record in caplog.records if record.name == "uvicorn.error" and record.exc_info]
