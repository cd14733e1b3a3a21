"""Ids, access lines, keys, CORS and error answers of a whole app on a real socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, MutableMapping
from queue import Queue
from typing import Any

import pytest
import structlog
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel

from shared.asgi.auth import BearerAuth
from shared.asgi.context import adopt_request_id, request_id_of
from shared.asgi.disconnect import run_until_disconnect
from shared.asgi.install import install_http
from shared.errors import Overloaded, PromptTooLong
from tests.support.servers import ServerThread, connect, reset, send_request

KEY, OTHER_KEY = "k" * 16, "schlüssel-öffnet-türen"
AUTH = {"Authorization": f"Bearer {KEY}"}


class Query(BaseModel):
    """A body that FastAPI validates."""

    n: int


class Lines:
    """Every log line as it is written; `ends` gets each access line, which is the last of its request."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.ends: Queue[dict[str, Any]] = Queue()

    def __call__(
        self, _logger: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        line = dict(event, level=method)
        self.all.append(line)
        if line["event"] == "request":
            self.ends.put(line)
        raise structlog.DropEvent


@pytest.fixture
def lines() -> Iterator[Lines]:
    """Catch what the server logs in its thread."""
    caught = Lines()
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, caught])
    yield caught
    structlog.reset_defaults()


def _routes(app: FastAPI) -> None:
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


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., ServerThread]]:
    """The app under given middleware settings; one server for each of them, since it holds no state."""
    running: dict[str, ServerThread] = {}

    def start(**settings: Any) -> ServerThread:
        name = repr(settings)
        if name not in running:
            app = FastAPI()
            _routes(app)
            defaults: dict[str, Any] = {"keys": (), "trust_caller_id": False}
            install_http(app, **(defaults | settings))
            running[name] = ServerThread(app).start()
        return running[name]

    yield start
    for server in running.values():
        server.stop()


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
    """405 says which methods there are; 429 says when to come back."""
    server = serve()
    assert "GET" == server.http.put("/id").headers["allow"]
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
