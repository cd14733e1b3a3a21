"""One request at a worker: the connection that it goes out on, and what has come of its response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.workers.connection import Connection, ConnectionBroken, Head, TransportError
from router.workers.connections import Connections


class TooMuch(TransportError):
    """An answer that has to be short is not."""


class Call:
    """Owned by whoever reads the response, until it closes it. Nothing here waits: `tell` is called at any news.

    Should the worker close a kept connection at the very moment of its reuse, the request goes once more on a new
    one: work is tied to its connection, so what a broken one asked for is not done.
    """

    def __init__(self, request: bytes, connections: Connections, tell: Callable[[], None]) -> None:
        self._request = request
        self._connections = connections
        self._tell = tell
        self._whole = bytearray()
        self._failure: BaseException | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._closed = False
        self._connection = connections.kept()
        self._may_repeat = self._connection is not None
        if self._connection is None:
            self._connect()
        else:
            self._connection.send(request, tell)

    def head(self) -> Head | None:
        """The response's, None while it has not come. Raises TransportError if it never will."""
        if self._failure is not None:
            raise self._failure
        if self._connection is None:
            return None
        try:
            return self._connection.head()
        except ConnectionBroken:
            if not self._may_repeat or self._connection.touched:
                raise
        # it was closed while idle: nothing was answered on it, so nothing was begun
        self._may_repeat = False
        self._connection = None
        self._connect()
        return None

    def take(self) -> bytes | None:
        """What of the body has come since the last call, once the head is there; see Connection.take."""
        assert self._connection is not None, "it brought the head"
        return self._connection.take()

    def whole(self, limit_bytes: int) -> bytes | None:
        """All of the body, None while some of it is missing. Raises TransportError."""
        while chunk := self.take():
            self._whole += chunk
            if len(self._whole) > limit_bytes:
                raise TooMuch(f"more than {limit_bytes} bytes")
        return None if chunk is None else bytes(self._whole)

    def close(self) -> None:
        """Once, and it is done when this returns.

        A response that was not read to its end takes its connection with it, which cancels the work behind it.
        """
        if self._closed:
            return
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connections.give(self._connection)

    def _connect(self) -> None:
        self._connecting = asyncio.create_task(self._connections.fresh(), name="connect")
        self._connecting.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[Connection]) -> None:
        if task.cancelled():
            return
        self._failure = task.exception()
        if self._failure is None:
            connection = task.result()
            if self._closed:
                connection.close()
                return
            self._connection = connection
            if connection.reusable:  # NOTE: on uvloop its loss can be told before this; then `head` raises it
                connection.send(self._request, self._tell)
        self._tell()
