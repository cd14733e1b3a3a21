"""Streams and whole answers whose client leaves: on real sockets, at every moment, nothing stays open."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from queue import Queue
from time import monotonic

import pytest
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Message, Scope

from shared.asgi.disconnect import run_until_disconnect
from shared.asgi.install import install_http
from shared.asgi.stream import NDJSON, SSE, OwnedStream, StreamFormat, StreamHead
from shared.errors import Overloaded
from shared.wire import DecodeEvent
from tests.support.servers import ServerThread, connect, read_until, reset, send_request

WAIT_S = 10


class Probe:
    """An owner whose every step the test sees, and holds up where it wants to.

    `at` is fed with each step's name. `go` lets a held step continue. `closed` counts complete closes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, hold: str = "") -> None:
        self.loop = loop
        self.hold = hold
        self.at: Queue[str] = Queue()
        self.go = asyncio.Event()
        self.closed = 0
        self.done = threading.Event()
        self.failure: Exception | None = None
        self.endless = False
        self.long_piece = b""
        self.sent = 0

    async def start(self) -> StreamHead:
        await self._step("start")
        return StreamHead(headers={"X-Late": "a\r\nX-Evil: b"})

    async def chunks(self) -> AsyncIterator[bytes]:
        await self._step("first")
        yield b"data: one\n\n"
        await self._step("second")
        yield b"data: two\n\n"
        while self.endless:
            self.sent += 1
            yield b"x" * 65_536
        if self.long_piece:
            yield self.long_piece
        await self._step("end")

    async def aclose(self) -> None:
        await asyncio.sleep(0)  # a cancellation that is not shielded would land here
        await self._step("close")
        self.closed += 1
        self.done.set()

    async def _step(self, name: str) -> None:
        self.at.put(name)
        if self.hold == name:
            await self.go.wait()
        if self.failure is not None and self.hold == name:
            raise self.failure

    def wait_for(self, step: str) -> None:
        """Return when the owner has arrived at `step`."""
        while self.at.get(timeout=WAIT_S) != step:
            pass

    def release(self) -> None:
        """Let the held step continue."""
        self.loop.call_soon_threadsafe(self.go.set)


class Site:
    """A server with one stream, whose owner is made by `prepare`."""

    def __init__(self, fmt: StreamFormat, *, send_timeout_s: float = 60.0) -> None:
        self.app = FastAPI()
        self.probe: Probe
        self.finished: Queue[str] = Queue()
        install_http(self.app, keys=(), trust_caller_id=False)

        @self.app.get("/stream")
        async def stream() -> Response:
            return OwnedStream(self.probe, fmt)

        @self.app.get("/whole")
        async def whole(request: Request) -> dict[str, str]:
            return await run_until_disconnect(request.receive, self.work())

        @self.app.get("/health")
        async def health() -> dict[str, str]:
            return {}

        self.server = ServerThread(self.app, send_timeout_s=send_timeout_s)

    def prepare(self, hold: str = "") -> Probe:
        """A fresh owner for the next request."""
        self.probe = Probe(self.server.loop, hold)
        return self.probe

    async def work(self) -> dict[str, str]:
        """A whole answer that takes until somebody releases the probe."""
        try:
            await self.probe._step("start")
        except asyncio.CancelledError:
            self.finished.put("cancelled")
            raise
        self.finished.put("answered")
        return {}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """One SSE server for all tests here."""
    made = Site(SSE)
    with made.server:
        yield made


def test_a_stream_arrives_piece_by_piece_with_its_headers(site: Site) -> None:
    """The first piece is read while the second is still being made; late headers are clean; no length."""
    probe = site.prepare(hold="second")
    with site.server.http.stream("GET", "/stream") as answer:
        pieces = answer.iter_raw()
        assert b"data: one\n\n" == next(pieces)
        probe.release()
        assert b"data: two\n\n" == b"".join(pieces)
    assert ("text/event-stream; charset=utf-8", "no-cache", "no") == (
        answer.headers["content-type"],
        answer.headers["cache-control"],
        answer.headers["x-accel-buffering"],
    )
    assert "aX-Evil: b" == answer.headers["x-late"]
    assert "x-evil" not in answer.headers
    assert "content-length" not in answer.headers
    assert probe.done.wait(WAIT_S)
    assert 1 == probe.closed


@pytest.mark.parametrize("hold", ["start", "first", "second", "end"])
@pytest.mark.parametrize("leave", [reset, lambda sock: sock.close()], ids=["reset", "close"])
def test_a_client_that_leaves_closes_the_owner_once(
    site: Site, hold: str, leave: Callable[[object], None]
) -> None:
    """Before the headers, before the first byte, between bytes, before the end: by RST or by FIN."""
    probe = site.prepare(hold)
    sock = connect(site.server)
    send_request(sock, "GET", "/stream")
    probe.wait_for(hold)
    leave(sock)
    assert probe.done.wait(WAIT_S)
    assert 1 == probe.closed
    assert 200 == site.server.http.get("/health").status_code


def test_a_client_that_leaves_during_the_close_does_not_interrupt_it(site: Site) -> None:
    """The stream has ended, its owner is closing, the socket is gone: the close still runs to its end."""
    probe = site.prepare(hold="close")
    sock = connect(site.server)
    send_request(sock, "GET", "/stream")
    probe.wait_for("close")
    reset(sock)
    assert 200 == site.server.http.get("/health").status_code
    assert 0 == probe.closed
    probe.release()
    assert probe.done.wait(WAIT_S)
    assert 1 == probe.closed


def test_three_hundred_hang_ups_leave_nothing(site: Site) -> None:
    """Every owner is closed, and the server is as quick as before."""
    probes = []
    for index in range(300):
        probe = site.prepare(hold=("start", "first", "second")[index % 3])
        sock = connect(site.server)
        send_request(sock, "GET", "/stream")
        probe.wait_for(probe.hold)
        reset(sock)
        probes.append(probe)
        assert probe.done.wait(WAIT_S)
    assert [1] * 300 == [probe.closed for probe in probes]
    assert 200 == site.server.http.get("/health").status_code


def test_a_slow_reader_holds_the_owner_back(site: Site) -> None:
    """What is not read is not made: memory stays bounded, and leaving then still closes the owner."""
    probe = site.prepare(hold="second")
    probe.endless = True
    sock = connect(site.server, receive_buffer_bytes=4096)
    send_request(sock, "GET", "/stream")
    read_until(sock, b"data: one")
    probe.release()
    before = -1
    while before != probe.sent:  # no further piece for as long as several answers take: the server waits
        before = probe.sent
        for _ in range(20):
            site.server.http.get("/health")
    assert 0 < probe.sent < 1000
    assert 0 == probe.closed
    reset(sock)
    assert probe.done.wait(WAIT_S)
    assert 1 == probe.closed


def test_a_reader_that_stopped_is_cut_off() -> None:
    """Its socket stays open and is not read: the owner waited there for ever, and kept all that it holds."""
    site = Site(SSE, send_timeout_s=0.2)
    with site.server:
        probe = site.prepare()
        probe.endless = True
        sock = connect(site.server, receive_buffer_bytes=4096)
        send_request(sock, "GET", "/stream")
        assert probe.done.wait(WAIT_S)
        assert 1 == probe.closed
        # What the kernel had taken still arrives; the rest is dropped, and it is no proper end.
        assert not read_until(sock, b"nothing but the end").endswith(b"0\r\n\r\n")
        sock.close()


def test_a_reader_that_is_slow_is_not_cut_off() -> None:
    """One long piece, longer on its way than the time-out, but never without any progress."""
    site = Site(SSE, send_timeout_s=2.0)
    with site.server:
        probe = site.prepare(hold="end")
        probe.long_piece = b"x" * 16_000_000
        sock = connect(site.server, receive_buffer_bytes=65_536)
        send_request(sock, "GET", "/stream")
        probe.wait_for("end")
        num_seen, started = 0, monotonic()
        while num_seen < 16_000_000:
            data = sock.recv(200_000)
            assert data
            num_seen += len(data)
            probe.done.wait(0.03)
        assert monotonic() - started > 2.2
        assert 0 == probe.closed
        probe.release()
        assert probe.done.wait(WAIT_S)
        sock.close()


def test_an_error_before_the_first_byte_is_a_real_status(site: Site) -> None:
    """Raised by `start`, answered like any other error, and the owner is closed."""
    probe = site.prepare(hold="start")
    probe.failure = Overloaded("No room.", retry_after_s=3)
    probe.go = asyncio.Event()
    probe.go.set()
    answer = site.server.http.get("/stream")
    assert (429, "3", "overloaded") == (
        answer.status_code,
        answer.headers["retry-after"],
        answer.json()["error"]["code"],
    )
    assert probe.done.wait(WAIT_S)
    assert 1 == probe.closed


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (Overloaded("No room."), "overloaded", "No room."),
        (RuntimeError("inner detail"), "internal_error", "The server failed while it answered."),
        (ConnectionResetError("of some worker"), "internal_error", "The server failed while it answered."),
    ],
)
@pytest.mark.parametrize("hold", ["first", "second"])
def test_an_error_after_the_first_byte_is_the_last_event(
    site: Site, failure: Exception, code: str, message: str, hold: str
) -> None:
    """One event in the OpenAI shape, then a proper end; only our own errors speak for themselves."""
    probe = site.prepare(hold)
    probe.failure = failure
    probe.go.set()
    answer = site.server.http.get("/stream")
    assert 200 == answer.status_code
    *data, last = [line for line in answer.text.splitlines() if line]
    assert (["data: one"] if hold == "second" else []) == data
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (code, message) == (error["code"], error["message"])
    assert probe.done.wait(WAIT_S)
    assert 1 == probe.closed


def test_an_error_in_an_internal_stream_is_its_last_line() -> None:
    """A reader of the protocol gets the exception's code as an `error` event."""
    site = Site(NDJSON)
    with site.server:
        probe = site.prepare(hold="first")
        probe.failure = Overloaded("No room.", retry_after_s=3)
        probe.go.set()
        answer = site.server.http.get("/stream")
    assert "application/x-ndjson" == answer.headers["content-type"]
    error = DecodeEvent.model_validate_json(answer.text).error
    assert error is not None
    assert ("overloaded", "No room.", 3.0) == (error.code, error.message, error.retry_after_s)


def test_a_server_that_stops_closes_the_owner() -> None:
    """A cancellation from the server is not mistaken for a hang-up, and the close is not cancelled."""
    site = Site(SSE)
    with site.server:
        probe = site.prepare(hold="second")
        sock = connect(site.server)
        send_request(sock, "GET", "/stream")
        probe.wait_for("second")
    assert 1 == probe.closed
    assert not read_until(sock, b"nothing but the end").endswith(b"0\r\n\r\n")
    sock.close()


def test_a_whole_answer_is_given_when_the_client_stays(site: Site) -> None:
    """The watcher costs nothing."""
    site.prepare()
    assert 200 == site.server.http.get("/whole").status_code
    assert "answered" == site.finished.get(timeout=WAIT_S)


@pytest.mark.parametrize("leave", [reset, lambda sock: sock.close()], ids=["reset", "close"])
def test_a_whole_answer_is_cancelled_when_the_client_leaves(
    site: Site, leave: Callable[[object], None]
) -> None:
    """Nobody computes for nobody."""
    probe = site.prepare(hold="start")
    sock = connect(site.server)
    send_request(sock, "GET", "/whole")
    probe.wait_for("start")
    leave(sock)
    assert "cancelled" == site.finished.get(timeout=WAIT_S)
    assert 200 == site.server.http.get("/health").status_code


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def test_a_send_that_fails_closes_the_owner() -> None:
    """Servers of ASGI 2.4 raise OSError from `send` where uvicorn says nothing."""
    probe = Probe(asyncio.get_running_loop())

    async def send(message: Message) -> None:
        raise OSError("gone")

    scope: Scope = {"type": "http", "state": {}}
    with pytest.raises(ClientDisconnect):
        await OwnedStream(probe, SSE)(scope, _never, send)
    assert 1 == probe.closed
