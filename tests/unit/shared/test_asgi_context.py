"""Request ids and access lines of a whole app on a real socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest
from fastapi import APIRouter, FastAPI, Request

from shared.asgi.context import adopt_request_id, request_id_of
from shared.asgi.disconnect import run_until_disconnect
from shared.asgi.install import install_http
from tests.support.servers import ServerThread, connect, reset, send_request
from tests.unit.shared.conftest import Lines


def _routes() -> APIRouter:
    app = APIRouter()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.get("/id")
    async def show_id(request: Request) -> dict[str, str]:
        return {"id": request_id_of(request.scope)}

    @app.post("/adopt")
    async def adopt(request: Request) -> dict[str, str]:
        adopt_request_id(request.scope, "req-from-body")
        return {}

    return app


@pytest.fixture(scope="module")
def serve(serve_routes: Callable[..., ServerThread]) -> Callable[..., ServerThread]:
    """These routes under given settings."""
    return partial(serve_routes, _routes())


def test_the_routers_ids_are_its_own(serve: Callable[..., ServerThread], lines: Lines) -> None:
    """Two requests with one X-Request-Id never share the internal id; the client's is echoed and logged."""
    server = serve()
    answers = [server.http.get("/id", headers={"X-Request-Id": "same"}) for _ in range(2)]
    ids = {answer.json()["id"] for answer in answers}
    assert 2 == len(ids)
    assert all(len(i) == 28 and i.startswith("req-") for i in ids)
    assert ["same", "same"] == [answer.headers["x-request-id"] for answer in answers]
    ends = [lines.ends.get(timeout=10) for _ in answers]
    assert ids == {end["request_id"] for end in ends}
    assert {"same"} == {end["client_request_id"] for end in ends}


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        (b"a b\"c'd", "ab\"c'd"),
        (b"../../x", "../../x"),
        (b"%0d%0a", "%0d%0a"),
        ("ключ-7".encode(), "-7"),
        (b"x" * 65_536, "x" * 128),
        (b"", None),
        ("ключ".encode(), None),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_clients_id_is_cleaned(
    serve: Callable[..., ServerThread], lines: Lines, sent: bytes, echoed: str | None
) -> None:
    """Visible ASCII, 128 characters; if nothing is left the internal id is told instead."""
    answer = serve().http.get("/id", headers=[(b"X-Request-Id", sent)])
    assert 200 == answer.status_code
    assert (echoed or answer.json()["id"]) == answer.headers["x-request-id"]


def test_a_worker_goes_by_the_routers_id(serve: Callable[..., ServerThread], lines: Lines) -> None:
    """From the header, or from the body once it is read; an id that is none of ours is replaced."""
    server = serve(trust_caller_id=True)
    told = server.http.get("/id", headers={"X-Request-Id": "req-1"})
    assert "req-1" == told.json()["id"] == lines.ends.get(timeout=10)["request_id"]
    replaced = server.http.get("/id", headers={"X-Request-Id": "a b"}).json()["id"]
    assert replaced.startswith("req-")
    assert replaced == lines.ends.get(timeout=10)["request_id"]
    adopted = server.http.post("/adopt")
    assert "req-from-body" == adopted.headers["x-request-id"] == lines.ends.get(timeout=10)["request_id"]


def test_context_does_not_leak_into_the_next_request(
    serve: Callable[..., ServerThread], lines: Lines
) -> None:
    """Two requests on one connection log their own client ids, and none where none was sent."""
    server = serve()
    server.http.get("/id", headers={"X-Request-Id": "first"})
    server.http.get("/id")
    assert "first" == lines.ends.get(timeout=10)["client_request_id"]
    assert "client_request_id" not in lines.ends.get(timeout=10)


def test_one_access_line_and_quiet_health(serve: Callable[..., ServerThread], lines: Lines) -> None:
    """Method, path without its query, status, ending and duration; health checks only at debug."""
    server = serve()
    server.http.get("/id?token=secret")
    server.http.get("/health")
    first, second = lines.ends.get(timeout=10), lines.ends.get(timeout=10)
    assert ("GET", "/id", 200, "ok", "info") == tuple(
        first[name] for name in ("method", "path", "status", "ending", "level")
    )
    assert first["duration_s"] >= 0
    assert "debug" == second["level"]
    assert "secret" not in repr(lines.all)


def test_the_access_line_tells_that_the_client_left(lines: Lines) -> None:
    """With the request's id, and no status, since none was sent."""
    arrived = threading.Event()
    app = FastAPI()

    async def endless() -> None:
        arrived.set()
        await asyncio.Event().wait()

    @app.get("/wait")
    async def wait(request: Request) -> None:
        await run_until_disconnect(request.receive, endless())

    install_http(app, keys=(), trust_caller_id=False)
    with ServerThread(app) as server:
        sock = connect(server)
        send_request(sock, "GET", "/wait", headers={"X-Request-Id": "mine"})
        assert arrived.wait(10)
        reset(sock)
        end = lines.ends.get(timeout=10)
    assert ("client_gone", None, "mine") == (end["ending"], end["status"], end["client_request_id"])
