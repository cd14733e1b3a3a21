"""Keys and CORS of a whole app on a real socket."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from fastapi import APIRouter, FastAPI, Request

from shared.asgi.auth import BearerAuth
from shared.asgi.context import request_id_of
from tests.support.servers import ServerThread
from tests.unit.shared.conftest import Lines

KEY, OTHER_KEY = "k" * 16, "schlüssel-öffnet-türen"
AUTH = {"Authorization": f"Bearer {KEY}"}


def _routes() -> APIRouter:
    app = APIRouter()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.get("/id")
    async def show_id(request: Request) -> dict[str, str]:
        return {"id": request_id_of(request.scope)}

    @app.get("/boom")
    async def boom() -> None:
        raise RuntimeError("inner http://10.0.0.1:9/ detail")

    return app


@pytest.fixture(scope="module")
def serve(serve_routes: Callable[..., ServerThread]) -> Callable[..., ServerThread]:
    """These routes under given settings."""
    return partial(serve_routes, _routes())


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        (b"", 401),
        (b"Bearer", 401),
        (b"Bearer wrong", 401),
        (f"Basic {KEY}".encode(), 401),
        (KEY.encode(), 401),
        (f"Bearer {KEY}x".encode(), 401),
        (b"Bearer \xff\xfe", 401),
        (f"Bearer {KEY}".encode(), 200),
        (f"bearer {KEY}".encode(), 200),
        (f"BEARER   {KEY}".encode(), 200),
        (f"Bearer {OTHER_KEY}".encode(), 200),
    ],
)
def test_a_key_is_asked_for(
    serve: Callable[..., ServerThread], lines: Lines, header: bytes | None, status: int
) -> None:
    """Any of the keys, with the scheme in any case; else 401 in the shape, and no key is ever logged."""
    server = serve(keys=[KEY, OTHER_KEY])
    headers = [] if header is None else [(b"Authorization", header)]
    answer = server.http.get("/id", headers=headers)
    assert status == answer.status_code
    if status == 401:
        assert ("Bearer", "invalid_api_key") == (
            answer.headers["www-authenticate"],
            answer.json()["error"]["code"],
        )
    lines.ends.get(timeout=10)
    assert KEY not in repr(lines.all)
    assert KEY not in answer.text


def test_only_open_paths_are_open(serve: Callable[..., ServerThread]) -> None:
    """Unknown paths and the API description need a key as well."""
    server = serve(keys=[KEY])
    assert 200 == server.http.get("/health").status_code
    for path in ("/id", "/nowhere", "/health/", "/openapi.json", "//health"):
        assert 401 == server.http.get(path).status_code
    assert 404 == server.http.get("/nowhere", headers=AUTH).status_code


@pytest.mark.parametrize("keys", [[], [""], [KEY, ""]])
def test_auth_without_a_real_key_cannot_be_built(keys: list[str]) -> None:
    """It would be a door without a lock."""
    with pytest.raises(ValueError, match="at least one key"):
        BearerAuth(FastAPI(), keys=keys, open_paths=())


def test_cors_is_off_by_default_and_whole_when_on(serve: Callable[..., ServerThread], lines: Lines) -> None:
    """A preflight needs no key; 401 and 500 carry the headers too."""
    origin = {"Origin": "http://page.test"}
    assert "access-control-allow-origin" not in serve().http.get("/id", headers=origin).headers
    server = serve(keys=[KEY], cors_origins=["http://page.test"], expose_headers=["Server-Timing"])
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert 200 == server.http.options("/id", headers=origin | asked).status_code
    for path, headers in (("/id", {}), ("/boom", AUTH), ("/id", AUTH)):
        answer = server.http.get(path, headers=origin | headers)
        assert "http://page.test" == answer.headers["access-control-allow-origin"]
        assert "Server-Timing" == answer.headers["access-control-expose-headers"]
