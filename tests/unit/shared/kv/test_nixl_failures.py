"""NIXL when the library itself fails: an error of that hand-off, and nothing lost or given out twice."""

from __future__ import annotations

import select
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from shared.errors import ReservationGone, TransportFailed
from shared.kv import told_chunk
from shared.kv.limits import ReceiveLimits
from shared.kv.outgoing import Send, SendTimeouts
from shared.kv.receiver import KvListener
from shared.kv.sender import KvSender
from shared.kv.shape import KvShape
from shared.kv.transports.nixl import NixlTransport
from shared.kv.transports.nixl_agent import Prepared, Read, ReadFailed
from shared.kv.transports.nixl_landing import LANDING_BYTES, NUM_SLOTS, Landing
from shared.kv.transports.nixl_notices import Notices
from shared.kv.transports.nixl_peers import NixlPeers
from shared.kv.transports.nixl_wire import TOKEN_BYTES, pack_notice
from shared.kv.transports.tcp import TcpTransport
from tests.unit.shared.kv.blobs import Pool, expected, manifest_for
from tests.unit.shared.kv.book import OneReservation
from tests.unit.shared.kv.conftest import SECRET, Agents, Listen
from tests.unit.shared.kv.test_nixl import Slow
from tests.unit.shared.kv.transfer import WAIT_S, finished, granted, reservation

TOKEN = bytes(TOKEN_BYTES)
WIDE = expected(num_tokens=512, shape=KvShape(num_layers=8, num_kv_heads=8, head_dim=64, dtype="F32"))


class Handle:
    """What the library gives for a read; it cannot be released."""

    def release(self) -> None:
        """As the library does while it holds on to it."""
        raise RuntimeError("NIXL_ERR_BACKEND")


@pytest.mark.parametrize("state", ["DONE", "ERR"])
def test_a_read_that_cannot_be_released_has_failed(state: str) -> None:
    """The library's own exception does not come through, and the read is over."""
    read = Read(None, Handle(), state)
    with pytest.raises(ReadFailed, match="NIXL_ERR_BACKEND"):
        read.done()


class Odd(Read):
    """A read that is under way, then a bug, then over."""

    def __init__(self) -> None:
        self.left = [RuntimeError("a bug"), False]

    def done(self) -> bool:
        """One after the other, from the end."""
        now = self.left.pop() if self.left else True
        if isinstance(now, Exception):
            raise now
        return bool(now)


def test_memory_is_given_out_once_whatever_fails(nixl: Agents) -> None:
    """A failure among reads that were set aside does not take those before it back a second time."""
    metadata = nixl.sending.metadata()
    peers = NixlPeers(nixl.receiving)
    with closing(peers):
        (name, first), (_, second) = peers.take(metadata), peers.take(metadata)
        slow = Slow()
        first.begun = [(slow, 0)]
        peers.give_back(name, first, is_broken=False)
        second.begun = [(Odd(), 0)]
        peers.give_back(name, second, is_broken=False)
        slow.end()
        with pytest.raises(RuntimeError, match="a bug"):
            peers.take(metadata)
        held = [peers.take(metadata)[1] for _ in range(3)]
        assert 3 == len({id(landing) for landing in held})
        for landing in held:
            peers.give_back(name, landing, is_broken=False)


class Failing(NixlPeers):
    """Cannot take anything back."""

    def give_back(self, name: str, landing: Landing, *, is_broken: bool) -> None:
        """A bug."""
        super().give_back(name, landing, is_broken=is_broken)
        raise RuntimeError("a bug")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_connection_that_fails_to_close_makes_room(nixl: Agents) -> None:
    """It leaves the listener's books nevertheless; after `max_connections` of them everything was answered 503."""
    book = reservation()
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    listener = KvListener(
        "127.0.0.1",
        0,
        book,
        secret=SECRET,
        limits=ReceiveLimits(max_connections=1),
        on_end=lambda _: book.committed.clear(),
        nixl=Failing(nixl.receiving),
    )
    listener.start()
    handoff = granted(listener.offer("127.0.0.1"))
    over_nixl = NixlTransport(source.memory, SECRET, nixl.sending)
    over_nixl.self_test()
    with closing(listener):
        for transport in (over_nixl, TcpTransport()):
            with closing(KvSender(SECRET, [transport], SendTimeouts())) as sender:
                sender.send(Send(handoff, "r1", manifest_for(expected()), source.views(), finished()))
                serving = [thread for thread in threading.enumerate() if thread.name == "kv"]
            for thread in serving:
                thread.join(WAIT_S)
            assert 0 == listener.num_connections


class Deaf:
    """The library, which cannot say what peers said for as long as it is `deaf`."""

    def __init__(self) -> None:
        self.deaf = True
        self.said: list[bytes] = []

    def __call__(self, *_: object) -> dict[str, list[bytes]]:
        """Its `get_new_notifs`."""
        if self.deaf:
            raise RuntimeError("NIXL_ERR_BACKEND")
        return {"decode": self.said}


def test_a_library_that_cannot_hear_fails_what_is_read(nixl: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits is told why, and the next reading is a new try: the thread that listens goes on."""
    library = Deaf()
    monkeypatch.setattr(nixl.sending._agent, "get_new_notifs", library)
    with closing(Notices(nixl.sending)) as notices:
        reading = notices.open(TOKEN)
        news = select.poll()
        news.register(reading.event, select.POLLIN)
        notices.tell(reading, 5)
        assert news.poll(1000 * WAIT_S)
        reading.drain()
        assert (False, "peers cannot be heard: NIXL_ERR_BACKEND") == (reading.is_due, str(reading.failure))
        library.deaf = False
        library.said.append(pack_notice(TOKEN, 7))
        notices.settle(reading)
        notices.tell(reading, 2)
        assert news.poll(1000 * WAIT_S)
        assert (7, None) == (reading.read_bytes, reading.failure)
        notices.forget(TOKEN)


def test_a_sender_that_cannot_hear_gives_the_way_up(
    listen: Listen, nixl: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two chunks, at once; it waited for `io_s` and said that decode was slow."""
    listening = listen(reservation())
    handoff = granted(listening.listener.offer("127.0.0.1"))
    source = Pool(expected().shape, num_tokens=10, seed=1)
    transport = NixlTransport(source.memory, SECRET, nixl.sending)
    transport.self_test()
    monkeypatch.setattr(nixl.sending._agent, "get_new_notifs", Deaf())
    with closing(KvSender(SECRET, [transport], SendTimeouts())) as sender:
        with pytest.raises(TransportFailed, match="cannot be heard"):
            sender.send(Send(handoff, "r1", manifest_for(expected()), source.views(), finished()))
        assert 200 != listening.next_report().status


class Unending:
    """Reads that go on until they are told to end, though they have begun as any other."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.reads: list[Slow] = []

    def begin(self, *_: object) -> Slow:
        """In place of the library."""
        self.reads.append(Slow())
        self.begun.set()
        return self.reads[-1]


def test_a_cancelled_reservation_has_its_blocks_at_once(
    listen: Listen, nixl: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a read goes on: it never goes to a block. What it goes to is given to nobody until it has ended."""
    book = OneReservation(WIDE, Pool(WIDE.shape, num_tokens=512, block_size=256))
    listening = listen(book)
    handoff = granted(listening.listener.offer("127.0.0.1"))
    source = Pool(WIDE.shape, num_tokens=512, block_size=256, seed=1)
    transport = NixlTransport(source.memory, SECRET, nixl.sending)
    transport.self_test()
    send = Send(handoff, "r1", manifest_for(WIDE, chunk_size=0), source.views(), finished())
    unending, peers = Unending(), listening.nixl
    assert peers is not None
    monkeypatch.setattr(Prepared, "read", unending.begin)
    with closing(KvSender(SECRET, [transport], SendTimeouts())) as sender, ThreadPoolExecutor() as threads:
        sending = threads.submit(sender.send, send)
        assert unending.begun.wait(WAIT_S)
        book.cancel()
        assert book.released.wait(WAIT_S)
        with pytest.raises(ReservationGone):
            sending.result(WAIT_S)
    listening.next_report()
    name, other = peers.take(nixl.sending.metadata())
    assert 2 * LANDING_BYTES == peers.landing_bytes
    for read in unending.reads:
        read.end()
    peers.give_back(name, other, is_broken=False)


class Reluctant(Read):
    """A read that takes its time, though the library has ended it at once. under_way: slots, most: of them."""

    def __init__(self, read: Read, under_way: list[Read], most: list[int]) -> None:
        self._read = read
        self._left = 3
        self._under_way = under_way
        under_way.append(self)
        most[0] = max(most[0], len(under_way))

    def done(self) -> bool:
        """At the fourth time of asking."""
        self._left -= 1
        if self._left < 0 and self._read.done():
            self._under_way.remove(self)
            return True
        return False


def test_reads_that_take_time_go_on_beside_each_other(
    listen: Listen, nixl: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each to a slot of its own, as many as there are, and the bytes arrive where they belong."""
    book = reservation()
    handoff = granted(listen(book).listener.offer("127.0.0.1"))
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    transport = NixlTransport(source.memory, SECRET, nixl.sending)
    transport.self_test()
    read, under_way, most = Prepared.read, list[Read](), [0]

    def reluctant(prepared: Prepared, local_first: int, remote_first: int, num_ranges: int) -> Read:
        return Reluctant(read(prepared, local_first, remote_first, num_ranges), under_way, most)

    monkeypatch.setattr(Prepared, "read", reluctant)
    # Batches of two rows, so that a tensor takes several.
    monkeypatch.setattr(told_chunk, "TOLD_BATCH_BYTES", 2 * book.want.shape.row_bytes)
    with closing(KvSender(SECRET, [transport], SendTimeouts())) as sender:
        sender.send(Send(handoff, "r1", manifest_for(expected(), chunk_size=0), source.views(), finished()))
    assert source.content() == book.pool.content()
    assert ([], [NUM_SLOTS]) == (under_way, most)
