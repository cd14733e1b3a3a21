"""What only NIXL does: reads that outlive their connection, and a way that is offered but does not work."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import closing, nullcontext

import pytest

from shared.errors import InvalidRequest, TransportFailed
from shared.kv.carrier import Body
from shared.kv.layout import BlobLayout
from shared.kv.manifest import Manifest
from shared.kv.outgoing import Send, SendTimeouts
from shared.kv.section import Section
from shared.kv.sender import KvSender
from shared.kv.stream import Stream
from shared.kv.ticket import Ticket
from shared.kv.transports.base import Connection, Interrupting, Transport, TransportUnavailable
from shared.kv.transports.choice import usable
from shared.kv.transports.nixl import NixlConnection, NixlTransport
from shared.kv.transports.nixl_agent import NixlAgent, Read, ReadFailed
from shared.kv.transports.nixl_notices import Notices
from shared.kv.transports.nixl_peers import NixlPeers
from shared.kv.transports.nixl_reads import NixlCarrier
from shared.kv.transports.nixl_wire import TOKEN_BYTES, Introduction, Terms
from shared.kv.transports.tcp import TcpTransport
from tests.unit.shared.kv.blobs import Pool, expected, manifest_for
from tests.unit.shared.kv.conftest import SECRET, Agents, Listen
from tests.unit.shared.kv.transfer import finished, granted, reservation

TOKEN = bytes(TOKEN_BYTES)
LAYOUT = BlobLayout(manifest_for(expected()))


class Slow(Read):
    """A read from a peer that was stopped: it goes on until `end`."""

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails
        self._ended = False

    def end(self) -> None:
        """The peer goes on, or dies."""
        self._ended = True

    def done(self) -> bool:
        """As the library says it."""
        if self._ended and self._fails:
            raise ReadFailed("the peer died")
        return self._ended


@pytest.mark.parametrize("fails", [False, True])
def test_memory_waits_for_reads_that_outlive_their_connection(nixl: Agents, *, fails: bool) -> None:
    """Nobody gets memory to which a read of another connection may still write."""
    metadata = nixl.sending.metadata()
    peers = NixlPeers(nixl.receiving)
    name, landing = peers.take(metadata)
    read = Slow(fails=fails)
    landing.begun = [(read, 0)]
    peers.give_back(name, landing, is_broken=False)
    other_name, other = peers.take(metadata)
    assert name == other_name
    assert landing is not other
    read.end()
    again = peers.take(metadata)[1]
    assert landing is again
    for held in (other, again):
        peers.give_back(name, held, is_broken=False)
    peers.close()


def test_unended_reads_are_bounded(nixl: Agents) -> None:
    """When too many of them have not ended, no more KV is read over NIXL."""
    peers = NixlPeers(nixl.receiving)
    reads = [Slow() for _ in range(64)]
    for read in reads:
        name, landing = peers.take(nixl.sending.metadata())
        landing.begun = [(read, 0)]
        peers.give_back(name, landing, is_broken=False)
    with pytest.raises(ReadFailed, match="too many"):
        peers.take(nixl.sending.metadata())
    for read in reads:
        read.end()
    name, landing = peers.take(nixl.sending.metadata())
    peers.give_back(name, landing, is_broken=False)
    peers.close()


def body_of(content: bytes) -> Body:
    """The body of a PUT that is all there."""
    left = memoryview(content)

    def receive(buffers: Sequence[memoryview], section: Section) -> int:
        nonlocal left
        taken = min(len(buffers[0]), len(left))
        buffers[0][:taken] = left[:taken]
        left = left[taken:]
        return taken

    ours, theirs = socket.socketpair()
    theirs.close()
    return Body(receive, lambda _: 0.0, Stream(ours))


def test_a_peer_introduces_itself_once(nixl: Agents) -> None:
    """A PUT without an introduction is refused before there was one, and one with it afterwards.

    A second introduction was taken for the ids of blocks.
    """
    introduction = Introduction(nixl.sending.metadata(), (1, 2, 3, 4)).pack(SECRET)
    first, later = Terms(16, len(introduction), TOKEN), Terms(16, 0, TOKEN)
    peers = NixlPeers(nixl.receiving)
    carrier = NixlCarrier(peers, SECRET, str(later))
    with closing(peers), closing(carrier):
        for terms, refused in ((later, "before it names"), (first, ""), (later, ""), (first, "once")):
            carrier.next_put(str(terms))
            body = body_of(introduction + bytes(LAYOUT.manifest.num_tokens * 4))  # and the blocks
            with (
                closing(body.stream),
                pytest.raises(InvalidRequest, match=refused) if refused else nullcontext(),
            ):
                slots = carrier.slots(body)
                slots.body_bytes(0, LAYOUT)
                slots.begin(LAYOUT)


class Introduced(NixlTransport):
    """Says of itself what it is told to; by default what the library does not understand."""

    def __init__(self, agent: NixlAgent, pool: Pool, introduction: bytes | None = None) -> None:
        super().__init__(pool.memory, SECRET, agent)
        bases = tuple(map(int, pool.memory.addresses))
        self._said = introduction or Introduction(b"nobody", bases).pack(SECRET)
        self._own = Notices(agent)
        self._way = TcpTransport()

    def connect(self, address: str, deadline: float, interrupting: Interrupting) -> Connection:
        stream = self._way.connect(address, deadline, interrupting).stream
        return NixlConnection(stream, 4, self._said, self._own)

    def close(self) -> None:
        self._own.close()
        super().close()


def test_a_way_that_does_not_work_is_left_for_another(listen: Listen, nixl: Agents) -> None:
    """The KV goes over the next transport within the same call, and for a while NIXL is not tried again."""
    book = reservation()
    listening = listen(book)
    handoff = granted(listening.listener.offer("127.0.0.1"))
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    transports: list[Transport] = [Introduced(nixl.sending, source), TcpTransport()]
    manifest: Manifest = manifest_for(expected())
    with closing(KvSender(SECRET, transports, SendTimeouts())) as sender:
        for _ in range(2):
            sent = sender.send(Send(handoff, "r1", manifest, source.views(), finished()))
            assert "tcp" == sent.transport
            assert source.content() == book.pool.content()
            book.committed.clear()
    for _ in range(3):
        listening.next_report()
    # A thread for each connection, so any of them may report first.
    ends = sorted((report.status, report.transport) for report in listening.reports)
    assert [(200, "tcp"), (200, "tcp"), (502, "nixl")] == ends


@pytest.mark.parametrize("secret", [SECRET, b"another secret"])
def test_the_library_is_given_only_what_a_worker_has_signed(
    listen: Listen, nixl: Agents, monkeypatch: pytest.MonkeyPatch, secret: bytes
) -> None:
    """502, and the KV goes another way, for an introduction with a flipped bit anywhere, or of somebody else.

    Some flips in metadata made the library end the decode process.
    """
    source = Pool(expected().shape, num_tokens=10, seed=1)
    bases = tuple(map(int, source.memory.addresses))
    signed = Introduction(nixl.sending.metadata(), bases).pack(secret)
    sound = secret == SECRET
    monkeypatch.setattr(NixlPeers, "take", lambda *_: pytest.fail("the library was asked"))
    for position in range(0, len(signed), 7) if sound else [0]:
        said = bytearray(signed)
        said[position] ^= sound << position % 8
        book = reservation()
        handoff = granted(listen(book).listener.offer("127.0.0.1"))
        transports: list[Transport] = [Introduced(nixl.sending, source, bytes(said)), TcpTransport()]
        with closing(KvSender(SECRET, transports, SendTimeouts())) as sender:
            sent = sender.send(Send(handoff, "r1", manifest_for(expected()), source.views(), finished()))
        assert "tcp" == sent.transport
        assert source.content() == book.pool.content()


def test_the_only_way_is_tried_again(listen: Listen, nixl: Agents) -> None:
    """A way that has failed is tried again if there is no other, and the error says what has failed.

    For a minute it said that no transport leads to the decode worker.
    """
    listening = listen(reservation())
    handoff = granted(listening.listener.offer("127.0.0.1"))
    source = Pool(expected().shape, num_tokens=10, seed=1)
    with closing(KvSender(SECRET, [Introduced(nixl.sending, source)], SendTimeouts())) as sender:
        for _ in range(2):
            with pytest.raises(TransportFailed, match="cannot be reached"):
                sender.send(Send(handoff, "r1", manifest_for(expected()), source.views(), finished()))
            assert 502 == listening.next_report().status


def test_a_pool_on_a_device_is_not_offered() -> None:
    """The transport says why it is not used."""
    with pytest.raises(TransportUnavailable, match="host memory"):
        NixlTransport(None, SECRET).self_test()
    assert ["tcp"] == [transport.name for transport in usable("nixl,tcp", secret=SECRET)]


def test_an_address_is_that_of_the_listener() -> None:
    """The PUT itself goes over TCP, to any host."""
    ticket = Ticket("h1", 7, "http://10.0.0.1:99/v1/kv/h1", "boot", 1.0)
    assert "10.0.0.1:99" == NixlTransport(None, SECRET).address(ticket)
