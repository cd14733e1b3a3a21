"""One HTTP/1.1 connection to a worker: a request in one piece, its response as it arrives, one at a time.

Lean on purpose: two general clients' worth of layers cost the router more CPU per request than all of its own work.
Only what a worker answers is understood: bodies with a length or in chunks. One that only the connection's end
ends cannot be told from a cut one, and counts as cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

MAX_HEAD_BYTES = 64 * 2**10
MAX_UNREAD_BYTES = 256 * 2**10
"""Above this much unread body the socket is left alone, so that the worker is slowed down instead."""


class TransportError(Exception):
    """A connection could not be made or did not last. Never leaves router.workers."""


class ConnectFailed(TransportError):
    """Nobody takes connections there."""


class ConnectTimedOut(TransportError):
    """Nobody took the connection in time."""


class WriteTimedOut(TransportError):
    """The request was not taken in time."""


class ConnectionBroken(TransportError):
    """It ended before the response did, or what came is no response."""


@dataclass(slots=True)
class Head:
    """headers: by lower-case name; of a repeated one the last."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)


class Connection(asyncio.Protocol):
    """Changed on its event loop only. `close` at any time ends it at once, and with it the work at the other end.

    Nothing here waits: who sends a request is told of news, and takes what there is.
    touched: has any byte of the current response come?
    """

    def __init__(self, *, write_timeout_s: float) -> None:
        self.touched = False
        self._write_timeout_s = write_timeout_s
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._failure: TransportError | None = None
        self._tell: Callable[[], None] | None = None
        self._is_choked = False
        self._is_paused = False
        self._keeps_alive = True
        self._complete = True
        self._start()

    @property
    def reusable(self) -> bool:
        """May another request go out on it?"""
        is_at_rest = self._complete and not self._is_choked and not self._is_paused
        return is_at_rest and self._keeps_alive and self._failure is None

    def send(self, content: bytes, tell: Callable[[], None]) -> None:
        """Send a whole request. `tell` is called whenever `head` or `take` has news, be it a failure."""
        assert self._transport is not None, "connected"
        assert self.reusable, "one request at a time"
        self._start()
        self._complete = False
        self._tell = tell
        self._transport.write(content)

    def head(self) -> Head | None:
        """The response's, None while it has not come. Raises TransportError if it never will."""
        if self._has_head:
            return self._head
        if self._failure is not None:
            raise self._failure
        return None

    def take(self) -> bytes | None:
        """All of the body that has come since the last call: None if nothing has, b"" at its end.

        Raises TransportError if it is cut.
        """
        if not self._unread:
            if self._complete:
                return b""
            if self._failure is not None:
                raise self._failure
            return None
        data = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
        self._unread.clear()
        self._num_unread = 0
        if self._is_paused and self._transport is not None and self._failure is None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def rest(self) -> None:
        """Nobody wants its news until the next request."""
        self._tell = None

    def close(self) -> None:
        """Drop it, whatever it is at."""
        self.rest()
        self._fail(ConnectionBroken("it was closed on this side"))

    def _start(self) -> None:
        self.touched = False
        self._head = Head()
        self._head_room = MAX_HEAD_BYTES
        self._has_head = False
        self._unread: list[bytes] = []
        self._num_unread = 0

    def _announce(self) -> None:
        if self._tell is not None:
            self._tell()

    def _fail(self, failure: TransportError) -> None:
        if self._failure is None:
            self._failure = failure
            if self._write_timer is not None:
                self._write_timer.cancel()
            if self._transport is not None:
                self._transport.abort()
            self._announce()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # NOTE: uvloop's is no subclass of it

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionBroken("it was closed by the worker" if exc is None else str(exc)))

    def pause_writing(self) -> None:
        self._is_choked = True
        self._write_timer = self._loop.call_later(
            self._write_timeout_s, self._fail, WriteTimedOut("the request was not taken in time")
        )

    def resume_writing(self) -> None:
        self._is_choked = False
        if self._write_timer is not None:
            self._write_timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.touched = True
        if self._failure is not None:
            return
        if self._complete:
            self._fail(ConnectionBroken("it brought what nothing had asked for"))
            return
        try:
            self._feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._fail(ConnectionBroken(f"what came is no response: {exc}"))
        if self._has_head:
            self._announce()

    def _feed(self, data: bytes) -> None:
        """Never more of a head than it may have. Raises what the parser does."""
        if not self._has_head:
            head, data = data[: self._head_room], data[self._head_room :]
            self._head_room -= len(head)
            self._parser.feed_data(head)
            if not self._head_room:
                self._check_head()
        if data:
            self._parser.feed_data(data)

    def _check_head(self) -> None:
        if not self._has_head:
            raise httptools.HttpParserError("its head is too long")

    # -- httptools' callbacks

    def on_message_begin(self) -> None:
        if self._complete:
            raise httptools.HttpParserError("a second response")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self._head.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._head.status = status
            self._keeps_alive = self._parser.should_keep_alive()
            self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._unread.append(body)
        self._num_unread += len(body)
        if self._num_unread > MAX_UNREAD_BYTES and not self._is_paused:
            assert self._transport is not None, "it brought data"
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._has_head:
            self._complete = True
        else:  # only a 1xx: the response itself is still to come
            self._head = Head()
