"""A connection to a worker whose every byte the test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from router.workers.connection import (
    MAX_HEAD_BYTES,
    MAX_UNREAD_BYTES,
    ConnectFailed,
    Connection,
    ConnectionBroken,
    Head,
    TransportError,
    WriteTimedOut,
)
from router.workers.connections import Address, Connections

REQUEST = b"GET /v1/info HTTP/1.1\r\nhost: w\r\ncontent-length: 0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
T = TypeVar("T")
Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(
    peer: Peer, *, write_timeout_s: float = 5.0, kind: type[Connections] = Connections
) -> AsyncIterator[Connections]:
    """Connections to a server that does with each what `peer` says."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await peer(reader, writer)
        finally:
            writer.close()
            gone.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connections = kind(
        Address.of(f"http://127.0.0.1:{port}"),
        max_idle=2,
        connect_timeout_s=5,
        write_timeout_s=write_timeout_s,
        ssl_context=None,
    )
    try:
        async with asyncio.timeout(10):
            yield connections
            connections.close()
            await gone.wait()
    finally:
        server.close()


def saying(*parts: bytes, stay: bool = True) -> Peer:
    """A peer that answers each request with the next part; afterwards it waits for the other end to leave."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            if not await reader.readuntil(b"\r\n\r\n"):
                return
            writer.write(part)
            await writer.drain()
        if stay:
            await reader.read()

    return peer


class Client:
    """Waits for what a connection only tells of."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._news = asyncio.Event()

    async def request(self, content: bytes = REQUEST) -> Head:
        """Send it; the head of the answer."""
        self.connection.send(content, self._news.set)
        return await self._until(self.connection.head)

    async def read(self) -> bytes:
        """What of the body has come, at least something; b"" at its end."""
        return await self._until(self.connection.take)

    async def body(self) -> bytes:
        """All that is left of it."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    async def whole(self) -> bytes:
        """The body of the answer to one request."""
        await self.request()
        return await self.body()

    async def _until(self, look: Callable[[], T | None]) -> T:
        while (found := look()) is None:
            self._news.clear()
            await self._news.wait()
        return found


async def test_a_response_that_was_read_leaves_a_connection_for_the_next() -> None:
    """Length, chunks, and a 1xx before the answer itself."""
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"
    async with serving(saying(OK, chunked, b"HTTP/1.1 100 Continue\r\n\r\n" + OK)) as connections:
        connection = await connections.fresh()
        client = Client(connection)
        for expected in (b"hi", b"abc", b"hi"):
            assert 200 == (await client.request()).status
            assert expected == await client.body()
            connections.give(connection)
            assert connection is connections.kept()
        connection.close()


async def test_parts_are_there_as_they_come() -> None:
    """A body is not waited for to its end."""
    read = asyncio.Event()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        await read.wait()
        writer.write(b"1\r\nb\r\n0\r\n\r\n")
        await reader.read()

    async with serving(peer) as connections:
        connection = await connections.fresh()
        client = Client(connection)
        await client.request()
        assert b"a" == await client.read()
        read.set()
        assert b"b" == await client.body()
        connections.give(connection)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\nhi",
        b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        b"not HTTP at all\r\n\r\n",
    ],
    ids=["nothing", "head", "length", "chunk", "no length", "bad length", "upgrade", "garbage"],
)
async def test_a_cut_or_garbled_answer_is_an_error(answer: bytes) -> None:
    """However much of it came: the end of a connection is never the end of an answer."""
    async with serving(saying(answer, stay=False)) as connections:
        connection = await connections.fresh()
        with pytest.raises(ConnectionBroken):
            await Client(connection).whole()
        assert (answer != b"") == connection.touched
        connections.give(connection)
        assert connections.kept() is None


@pytest.mark.parametrize("surplus", [OK, b"x"], ids=["response", "garbage"])
async def test_what_nobody_asked_for_costs_the_connection(surplus: bytes) -> None:
    """The answer before it is whole, and nothing of the surplus gets into it."""
    async with serving(saying(OK + surplus)) as connections:
        connection = await connections.fresh()
        assert b"hi" == await Client(connection).whole()
        assert not connection.reusable
        connections.give(connection)


async def test_a_connection_that_the_worker_does_not_keep_is_not_kept_here() -> None:
    """`connection: close` is believed."""
    async with serving(saying(OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))) as connections:
        connection = await connections.fresh()
        assert b"hi" == await Client(connection).whole()
        connections.give(connection)
        assert connections.kept() is None


async def test_a_connection_that_is_not_read_from_is_not_kept() -> None:
    """A long body that nobody took once left one that would never have brought the next answer."""
    async with serving(saying(b"")) as connections:
        connection = await connections.fresh()
        connection.send(REQUEST, lambda: None)
        size = MAX_UNREAD_BYTES + 1
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
        connections.give(connection)
        assert connections.kept() is None


async def test_a_head_without_an_end_is_bounded() -> None:
    """It is given up at its longest, not collected for ever."""
    async with serving(saying(b"HTTP/1.1 200 OK\r\na: " + b"b" * 2 * MAX_HEAD_BYTES)) as connections:
        connection = await connections.fresh()
        client = Client(connection)
        with pytest.raises(ConnectionBroken, match="too long"):
            await client.request()


async def test_closing_ends_the_work_at_the_other_end() -> None:
    """The server sees the hang-up of a stream that was left half way (else `serving` would time out)."""
    async with serving(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi")) as connections:
        connection = await connections.fresh()
        client = Client(connection)
        await client.request()
        assert b"hi" == await client.read()
        connections.give(connection)
        assert connections.kept() is None


async def test_a_worker_that_sends_faster_than_is_read_is_slowed_down() -> None:
    """What is unread stays bounded, and comes out whole."""
    size = 64 * 2**20

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        writer.write(b"x" * size)
        await writer.drain()
        await reader.read()

    async with serving(peer) as connections:
        connection = await connections.fresh()
        client = Client(connection)
        await client.request()
        while not connection._is_paused:  # noqa: ASYNC110 - it has no event, and needs none
            await asyncio.sleep(0)
        first = await client.read()
        assert MAX_UNREAD_BYTES <= len(first) <= 3 * MAX_UNREAD_BYTES
        assert size == len(first) + len(await client.body())
        connections.give(connection)


async def test_a_worker_that_does_not_take_the_request_is_left_in_time() -> None:
    """A write has its own bound, which no response waits for."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await left.wait()

    left = asyncio.Event()
    async with serving(peer, write_timeout_s=0.05) as connections:
        connection = await connections.fresh()
        client = Client(connection)
        with pytest.raises(WriteTimedOut):
            await client.request(b"x" * 64 * 2**20)
        left.set()


async def test_a_kept_connection_that_the_worker_closes_is_not_taken() -> None:
    """Seen when it happens, not at the next request."""
    async with serving(saying(OK, stay=False)) as connections:
        connection = await connections.fresh()
        await Client(connection).whole()
        connections.give(connection)
        while connection.reusable:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        assert connections.kept() is None


async def test_no_more_than_some_are_kept() -> None:
    """Those that were given back first are closed first."""
    async with serving(saying(OK)) as connections:
        opened = [await connections.fresh() for _ in range(3)]
        for connection in opened:
            await Client(connection).whole()
        for connection in opened:
            connections.give(connection)
        assert [False, True, True] == [connection.reusable for connection in opened]


async def test_an_address_where_nobody_listens_refuses() -> None:
    """A kind of its own: the worker is known to be gone."""
    probe = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = probe.sockets[0].getsockname()[1]
    probe.close()
    for host in ("127.0.0.1", "no..host"):
        address = Address.of(f"http://{host}:{port}")
        connections = Connections(
            address, max_idle=1, connect_timeout_s=5, write_timeout_s=5, ssl_context=None
        )
        with pytest.raises(ConnectFailed) as caught:
            await connections.fresh()
        assert isinstance(caught.value, TransportError)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://a:81", Address("a", 81, "a:81", "", False)),
        ("http://[::1]:81/b", Address("::1", 81, "[::1]:81", "/b", False)),
        ("https://u:p@a", Address("a", 443, "a", "", True)),
    ],
)
def test_addresses(url: str, expected: Address) -> None:
    """Host, port and what comes before every path."""
    assert expected == Address.of(url)
