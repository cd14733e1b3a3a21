"""uvicorn's HTTP/1.1 protocol with a bounded head, and with JSON where it refuses bytes that are no HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from shared.asgi.answers import error_response
from shared.asgi.stall import StallWatch
from shared.errors import InvalidRequest

MAX_HEAD_BYTES = 512 * 1024
MAX_PIPELINED = 8


class _UntilClose(int):
    """A Content-Length that any body has: never exceeded, never left over."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> _UntilClose:
        return self


class BoundedHttp(HttpToolsProtocol):
    """Refuses a request whose line and headers go far beyond any use; httptools itself buffers without end.

    The limit is above what one read of a socket returns, since a read that ends a head can hold body as well.

    Requests that come before an answer is complete wait for their turn, but never stop the reading, as they do in
    uvicorn: whoever does not read is not told of a hang-up. Too many, or too long ones, are dropped, and the
    connection ends with the answer.

    An offer to go on in another protocol is declined by going on in this one. Java's client makes one with every
    request, and httptools stops there: uvicorn would answer without the body, and hear nothing after it.

    Who reads nothing of an answer for `send_timeout_s` is cut off, and the app told that the client has gone.
    """

    _head_bytes: int | None = 0  # None while a body is read
    _running: RequestResponseCycle | None = None
    _is_full = False  # what comes is dropped
    _stall: StallWatch

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        send_timeout_s: float,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._send_timeout_s = send_timeout_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._stall = StallWatch(transport, self.loop, self._send_timeout_s)

    def pause_writing(self) -> None:
        """The client does not take what is written as fast as it is."""
        super().pause_writing()
        self._stall.begin()

    def resume_writing(self) -> None:
        """It has taken it."""
        super().resume_writing()
        self._stall.end()

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head that was not complete before this read."""
        if self._is_full:
            return
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The request's headers are too long.")
                return
        self._unset_keepalive_if_required()
        try:
            while data and not self._is_full:
                data = self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def on_headers_complete(self) -> None:
        """The head is over; what follows is body."""
        self._head_bytes = None
        if self._is_offer:
            return
        super().on_headers_complete()
        self._read_on()

    def on_body(self, body: bytes) -> None:
        """A part of the body of the request that came last."""
        super().on_body(body)
        self._read_on()

    def on_message_complete(self) -> None:
        """The body is over; what follows is the next request's head."""
        if self._is_offer:
            return
        self._head_bytes = 0
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the connection. uvicorn 0.54 keeps the idle timer, and with it all of this, after a reset."""
        super().connection_lost(exc)
        self._stall.end()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True  # NOTE: uvicorn tells only the request that came last
            self._running.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """Refuse and hang up; without a word if an answer is being written, which it would only garble.

        Where it is a body that is broken, its request may be running: for that one the client has gone.
        What is broken behind a whole request is none of that one's business: it is answered, then comes the end.
        """
        cycle: RequestResponseCycle | None = self.cycle  # NOTE: None before the first request
        if (
            self._running is not None
            and not self._running.response_complete
            and self._is_whole(self._running)
        ):
            self._is_full = True
            self._running.keep_alive = False
            self.pipeline.clear()
            return
        is_unanswered = cycle is self._running and cycle is not None and not cycle.response_started
        if is_unanswered and cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        if cycle is None or cycle.response_complete or is_unanswered:
            answer = error_response(InvalidRequest(msg))
            head = b"".join(b"%s: %s\r\n" % pair for pair in answer.raw_headers)
            body = bytes(answer.body)
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n" + head + b"\r\n" + body)
        self.transport.close()

    def _is_whole(self, cycle: RequestResponseCycle) -> bool:
        """Has all of its body come?"""
        return cycle is not self.cycle or not cycle.more_body

    @property
    def _is_offer(self) -> bool:
        """The head that was read last asks for another protocol. CONNECT, which nobody serves, is none."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _feed(self, data: bytes) -> bytes:
        """Parse. What is left to be parsed: the same head without its offer, and all that came behind it."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            if not self._is_offer:
                return b""
            line = b"%s %s HTTP/%s" % (
                self.parser.get_method(),
                self.url,
                self.parser.get_http_version().encode(),
            )
            headers = [b"%s: %s" % pair for pair in self.headers if pair[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)  # NOTE: the old one takes nothing more
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            return b"\r\n".join([line, *headers, b"", data[exc.args[0] :]])
        return b""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        if self.scope["http_version"] == "1.0":
            # NOTE: uvicorn sends chunks to who does not know them; here such a body ends with the connection.
            cycle.keep_alive = False
            cycle.chunked_encoding = False
            cycle.expected_content_length = _UntilClose()
        super()._start_asgi_task(cycle, app)

    def _read_on(self) -> None:
        if not self.pipeline:
            return
        if self._is_full or len(self.pipeline) > MAX_PIPELINED or len(self.cycle.body) > HIGH_WATER_LIMIT:
            self._is_full = True
            self.pipeline.clear()
            if self._running is not None:
                self._running.keep_alive = False
        self.flow.resume_reading()
