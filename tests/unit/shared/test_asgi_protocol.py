"""The HTTP/1.1 protocol below the app: what it refuses, and what it lets go of."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from shared.asgi.install import install_http
from shared.asgi.protocol import BoundedHttp
from tests.support.servers import ServerThread, connect, read_until, reset, send_request


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    """An app with one stream; everything else is a 404, which is an answer too."""
    app = FastAPI()
    install_http(app, keys=(), trust_caller_id=False)

    @app.post("/echo")
    async def echo(request: Request) -> Response:
        return Response(request.method.encode() + b" " + await request.body())

    @app.post("/late")
    async def late(request: Request) -> Response:
        for _ in range(100):  # turns of the loop, in which all that was sent is read
            await asyncio.sleep(0)
        return await echo(request)

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


@pytest.mark.parametrize("path", ["/echo", "/late"])
def test_garbage_behind_a_request_is_not_its_answer(server: ServerThread, path: str) -> None:
    """The request is answered, then the connection ends; it was once cancelled, and had the garbage's 400."""
    with connect(server) as sock:
        sock.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab".encode() + b"NOT HTTP\r\n\r\n"
        )
        answer = read_until(sock, b"nothing but the end")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"POST ab")
    assert 1 == answer.count(b"HTTP/1.1")


OFFER = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAA"}
WEBSOCKET = {"Connection": "upgrade", "UPGRADE": "websocket", "Sec-WebSocket-Version": "13"}


@pytest.mark.parametrize("headers", [OFFER, WEBSOCKET, OFFER | {"Expect": "100-continue"}])
def test_an_offer_of_another_protocol_is_declined(server: ServerThread, headers: dict[str, str]) -> None:
    """Body and all, also of what follows on the connection. uvicorn gave the app an empty body, and then hung."""
    with connect(server) as sock:
        for number in range(3):
            send_request(sock, "POST", "/echo", headers=headers, body=b"body %d" % number)
            assert b"POST body %d" % number in read_until(sock, b"body %d" % number)
        send_request(sock, "GET", "/stream")
        assert b"two" in read_until(sock, b"two")


def test_offers_in_many_pieces_and_many_in_one(server: ServerThread) -> None:
    """However the bytes are cut; chunked bodies too."""
    request = b"POST /echo HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n"
    chunked = request + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
    for step in (1, 7, 60, len(chunked)):
        with connect(server) as sock:
            for start in range(0, len(chunked), step):
                sock.sendall(chunked[start : start + step])
            assert b"POST abcdefg" in read_until(sock, b"defg")
    plain = request + b"Content-Length: 2\r\n\r\n"
    with connect(server) as sock:
        sock.sendall(plain + b"ab" + plain + b"cd" + chunked)
        answer = read_until(sock, b"defg")
    assert 3 == answer.count(b"HTTP/1.1 200 ")
    assert answer.index(b"POST ab") < answer.index(b"POST cd") < answer.index(b"POST abcdefg")


@pytest.mark.parametrize("target", ["example.com:443", "/echo"])
def test_nobody_connects_through_here(server: ServerThread, target: str) -> None:
    """CONNECT is answered like any other method that does not exist."""
    with connect(server) as sock:
        sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert read_until(sock, b"}").startswith((b"HTTP/1.1 400", b"HTTP/1.1 404", b"HTTP/1.1 405"))


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
