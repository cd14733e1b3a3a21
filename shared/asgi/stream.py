"""A streamed answer that owns what feeds it, from the moment it is called until everything is closed.

A generator's `finally` is not enough: if the client leaves before the first body byte the generator never
started, and nothing that it would have closed is closed. So the owner is an object that this response closes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from shared.asgi.answers import error_event, error_line
from shared.asgi.context import note_ending
from shared.asgi.disconnect import finish, run_until_disconnect
from shared.asgi.text import header_value
from shared.errors import ServingError

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class StreamFormat:
    """How a stream is labelled, and how an error after its first byte is told."""

    headers: Mapping[str, str]
    encode_error: Callable[[ServingError], bytes]


_NO_BUFFERING = {"cache-control": "no-cache", "x-accel-buffering": "no"}
SSE: Final = StreamFormat(
    MappingProxyType({"content-type": "text/event-stream; charset=utf-8", **_NO_BUFFERING}), error_event
)
NDJSON: Final = StreamFormat(
    MappingProxyType({"content-type": "application/x-ndjson", **_NO_BUFFERING}), error_line
)

# An error after its first byte ends the connection early: the Content-Length that its owner gave says so.
FILE: Final = StreamFormat(MappingProxyType({"content-type": "application/octet-stream"}), lambda _: b"")


@dataclass(frozen=True)
class StreamHead:
    """Status and extra headers of a stream, known once its owner has started."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class StreamOwner(Protocol):
    """What feeds a stream. Each method is called at most once, `aclose` always, in this order."""

    async def start(self) -> StreamHead:
        """Do all that decides the status. A ServingError here becomes a real HTTP status."""

    def chunks(self) -> AsyncIterator[bytes]:
        """The body, in pieces that are sent as they come. A ServingError here becomes the last event."""

    async def aclose(self) -> None:
        """Free everything, whatever happened before. Shielded from cancellation, so it must be bounded."""


class OwnedStream(Response):
    """Sends `owner`'s chunks and closes it exactly once: at the end, on error, on hang-up, when cancelled.

    The client's hang-up cancels `start` or `chunks` where they wait. A slow reader slows `chunks` down;
    for one that has stopped, shared.asgi.stall is its hang-up.
    """

    def __init__(self, owner: StreamOwner, fmt: StreamFormat) -> None:
        self.background = None
        self.status_code = 200
        self.init_headers(fmt.headers)  # NOTE: with no `body` set it adds no content-length
        self._owner = owner
        self._format = fmt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._serve(scope, send))
        finally:
            await finish(self._owner.aclose())

    async def _serve(self, scope: Scope, send: Send) -> None:
        async def deliver(message: Message) -> None:
            try:
                await send(message)
            except OSError as exc:  # NOTE: how ASGI 2.4 servers report that the client has gone
                raise ClientDisconnect from exc

        head = await self._owner.start()
        self.status_code = head.status
        for name, value in head.headers.items():
            self.headers[name] = header_value(value)
        await deliver(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            async with AsyncExitStack() as stack:
                chunks = self._owner.chunks()
                if isinstance(chunks, AsyncGenerator):
                    stack.push_async_callback(chunks.aclose)
                async for chunk in chunks:
                    await deliver({"type": "http.response.body", "body": chunk, "more_body": True})
        except ClientDisconnect:
            raise
        except Exception as exc:  # noqa: BLE001 - the last handler: told to the client, and logged
            await deliver(
                {"type": "http.response.body", "body": self._failure(scope, exc), "more_body": True}
            )
        await deliver({"type": "http.response.body", "body": b"", "more_body": False})

    def _failure(self, scope: Scope, exc: Exception) -> bytes:
        """What is told of `exc`, which came after the first byte; only a ServingError speaks for itself."""
        if not isinstance(exc, ServingError):
            _log.error("stream_failed", exc_info=exc)
            exc = ServingError("The server failed while it answered.")
        note_ending(scope, exc.code)
        return self._format.encode_error(exc)
