"""One request over connections that may have been closed meanwhile, against a peer whose every byte is known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from router.workers.call import Call, TooMuch
from router.workers.connection import Connection, ConnectionBroken
from router.workers.connections import Connections
from tests.unit.router.workers.test_connection import OK, REQUEST, serving


class Peer:
    """Answers the first request of a connection; on the second one it sends `last_words` and hangs up."""

    def __init__(self, last_words: bytes = b"") -> None:
        self.requests: list[int] = []
        self._last_words = last_words
        self._num_connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection. `requests` gets its number with every request that came over it."""
        self._num_connections += 1
        number = self._num_connections
        for answer in (OK, self._last_words):
            await reader.readuntil(b"\r\n\r\n")
            self.requests.append(number)
            writer.write(answer)
            await writer.drain()


async def ask(connections: Connections, limit_bytes: int = 100) -> bytes:
    """The body of one answer."""
    news = asyncio.Event()
    call = Call(REQUEST, connections, news.set)
    try:
        while call.head() is None or (body := call.whole(limit_bytes)) is None:
            news.clear()
            await news.wait()
        return body
    finally:
        call.close()


async def test_a_kept_connection_that_closes_at_its_reuse_costs_nothing() -> None:
    """Not a byte was answered on it, so the request goes out once more, on a connection of its own."""
    peer = Peer()
    async with serving(peer) as connections:
        assert [b"hi", b"hi"] == [await ask(connections) for _ in range(2)]
    assert [1, 1, 2] == peer.requests


async def test_a_request_that_was_begun_to_be_answered_is_not_repeated() -> None:
    """One byte is enough."""
    peer = Peer(b"H")
    async with serving(peer) as connections:
        await ask(connections)
        with pytest.raises(ConnectionBroken):
            await ask(connections)
    assert [1, 1] == peer.requests


async def test_a_request_is_repeated_once() -> None:
    """A new connection that closes without a byte is an error: its end is no matter of bad timing."""
    requests: list[int] = []

    def served(number: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        return Peer() if number == 1 else _hang_up

    async def _hang_up(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(len(requests) + 1)
        await served(requests[-1])(reader, writer)

    async with serving(peer) as connections:
        await ask(connections)
        with pytest.raises(ConnectionBroken):
            await ask(connections)
    assert [1, 2] == requests


class Slow(Connections):
    """Has a connection only when the peer has closed it, as it can be on uvloop."""

    async def fresh(self) -> Connection:
        connection = await super().fresh()
        while connection.reusable:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        return connection


async def test_a_peer_that_closes_at_once_is_an_error_at_once() -> None:
    """One that was lost before the request could go out once told nobody: its leg waited for the stage's limit."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        return

    async with serving(peer, kind=Slow) as connections:
        with pytest.raises(ConnectionBroken):
            await ask(connections)


async def test_an_answer_that_has_to_be_short_is_bounded() -> None:
    """What is longer is given up, and its connection with it."""
    async with serving(Peer()) as connections:
        with pytest.raises(TooMuch):
            await ask(connections, limit_bytes=1)
