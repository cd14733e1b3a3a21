"""uvicorn's HTTP/1.1 protocol with a bounded head, and with JSON where it refuses bytes that are no HTTP."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from shared.asgi.answers import error_response
from shared.errors import InvalidRequest

MAX_HEAD_BYTES = 512 * 1024


class BoundedHttp(HttpToolsProtocol):
    """Refuses a request whose line and headers go far beyond any use; httptools itself buffers without end.

    The limit is above what one read of a socket returns, since a read that ends a head can hold body as well.
    """

    _head_bytes: int | None = 0  # None while a body is read

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head that was not complete before this read."""
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The request's headers are too long.")
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """The head is over; what follows is body."""
        self._head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is over; what follows is the next request's head."""
        self._head_bytes = 0
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the connection. uvicorn 0.54 keeps the idle timer, and with it all of this, after a reset."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        """Refuse and hang up; without a word if an answer is being written, which it would only garble."""
        cycle: RequestResponseCycle | None = self.cycle  # NOTE: None before the first request
        if cycle is None or cycle.response_complete:
            answer = error_response(InvalidRequest(msg))
            head = b"".join(b"%s: %s\r\n" % pair for pair in answer.raw_headers)
            body = bytes(answer.body)
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n" + head + b"\r\n" + body)
        self.transport.close()
