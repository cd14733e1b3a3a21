"""uvicorn's HTTP/1.1 protocol with a bounded head, and with JSON where it refuses bytes that are no HTTP."""

from __future__ import annotations

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shared.asgi.answers import error_response
from shared.errors import InvalidRequest

MAX_HEAD_BYTES = 256 * 1024


class BoundedHttp(HttpToolsProtocol):
    """Refuses a request whose line and headers exceed MAX_HEAD_BYTES; httptools itself buffers without end."""

    _head_bytes: int | None = 0  # None while a body is read

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head that is not complete yet."""
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The request's headers are too long.")
                return
        super().data_received(data)
