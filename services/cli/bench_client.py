"""An HTTP client that costs little beside what it measures: over the connections that the router has to workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from router.workers.call import Call
from router.workers.connection import TransportError
from router.workers.connections import Address, Connections
from services.cli.bench_stack import StackFailed

_TIMEOUT_S = 60.0
_MAX_IDLE = 1024


class Answer:
    """A response as it comes."""

    def __init__(self, request: bytes, connections: Connections) -> None:
        self._news = asyncio.Event()
        self._call = Call(request, connections, self._news.set)
        self._rest = b""

    async def part(self) -> bytes:
        """What of the body has come, at least something; b"" at its end. Raises StackFailed."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while (part := self._take()) is None:
                    self._news.clear()
                    await self._news.wait()
        except (TransportError, TimeoutError) as exc:
            raise StackFailed(f"no whole answer came: {exc}") from exc
        return part

    async def lines(self) -> list[bytes]:
        """The lines that are whole by now, at least one; none at the end of the body. Raises StackFailed.

        However the body is cut into parts; what is of no whole line yet is kept for the next call.
        """
        while part := await self.part():
            *lines, self._rest = (self._rest + part).split(b"\n")
            if lines:
                return lines
        if self._rest:
            raise StackFailed("an answer ended within a line")
        return []

    async def end(self) -> None:
        """Read what is left. Raises StackFailed."""
        while await self.part():
            pass

    def close(self) -> None:
        """Keep the connection if the answer was read to its end."""
        self._call.close()

    def _take(self) -> bytes | None:
        head = self._call.head()
        if head is None:
            return None
        if head.status != 200:
            raise StackFailed(f"an answer had the status {head.status}")
        return self._call.take()


class BenchClient:
    """Posts to a few addresses, each with the connections that it needs."""

    def __init__(self, secret: str, urls: Iterable[str]) -> None:
        self._headers = f"authorization: Bearer {secret}\r\ncontent-type: application/json\r\n"
        self._connections = {
            url: Connections(
                Address.of(url),
                max_idle=_MAX_IDLE,
                connect_timeout_s=_TIMEOUT_S,
                write_timeout_s=_TIMEOUT_S,
                ssl_context=None,
            )
            for url in urls
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for connections in self._connections.values():
            connections.close()

    @asynccontextmanager
    async def post(self, url: str, path: str, body: bytes) -> AsyncIterator[Answer]:
        """The answer to `body`; one that is left half way loses its connection."""
        connections = self._connections[url]
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {connections.address.authority}\r\n"
            f"{self._headers}content-length: {len(body)}\r\n\r\n"
        )
        answer = Answer(head.encode("ascii") + body, connections)
        try:
            yield answer
        finally:
            answer.close()
