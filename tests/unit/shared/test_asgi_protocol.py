"""The HTTP/1.1 protocol below the app: what it refuses, and what it lets go of."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from shared.asgi.install import install_http
from shared.asgi.protocol import BoundedHttp
from tests.support.servers import ServerThread, connect, read_until, reset, send_request


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    """An app with one stream; everything else is a 404, which is an answer too."""
    app = FastAPI()
    install_http(app, keys=(), trust_caller_id=False)

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(iter([b"one ", b"two"]))

    with ServerThread(app) as running:
        yield running


def test_bytes_that_are_no_http_are_told_so_in_json(server: ServerThread) -> None:
    """Even where no app is involved."""
    with connect(server) as sock:
        sock.sendall(b"NOT HTTP\r\n\r\n")
        answer = read_until(sock, b"nothing but the end")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"invalid_request_error"' in answer


@pytest.mark.parametrize("path", ["/stream", "/"])
def test_an_old_client_gets_no_chunks(server: ServerThread, path: str) -> None:
    """HTTP/1.0 does not know them: the body is bare, and ends with the connection."""
    with connect(server) as sock:
        sock.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        head, _, body = read_until(sock, b"nothing but the end").partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body == b"one two" or body.startswith(b'{"error":')


def test_a_head_without_end_is_refused(server: ServerThread) -> None:
    """Memory stays bounded; an ordinary body beyond that size is not affected."""
    endless = b"GET / HTTP/1.1\r\nX-Long: " + b"x" * 50_000_000
    with connect(server) as sock, pytest.raises(OSError, match=r"reset|pipe"):
        sock.sendall(endless)
    assert 404 == server.http.post("/", content=b"x" * 2_000_000).status_code


def test_pipelined_requests_are_answered_in_order(server: ServerThread) -> None:
    """Counting heads does not stumble over two of them in one read."""
    with connect(server) as sock:
        send_request(sock, "POST", "/", body=b"x" * 1000)
        send_request(sock, "GET", "/", headers={"Connection": "close"})
        answer = read_until(sock, b"nothing but the end")
    assert 2 == answer.count(b"HTTP/1.1 404 ")


def test_connections_that_were_reset_are_forgotten(server: ServerThread) -> None:
    """uvicorn's idle timer kept each of them for the whole keep-alive time, and so memory grew under load."""
    for _ in range(100):
        sock = connect(server)
        send_request(sock, "GET", "/")
        read_until(sock, b"not_found_error")
        reset(sock)
    rounds = 0
    while _num_connections() > 2 and rounds < 50:  # each answer gives the loop the time to see the resets
        server.http.get("/")
        rounds += 1
    assert _num_connections() <= 2  # that of `server.http`, and at most one that is closing


def _num_connections() -> int:
    gc.collect()
    return sum(type(thing) is BoundedHttp for thing in gc.get_objects())
