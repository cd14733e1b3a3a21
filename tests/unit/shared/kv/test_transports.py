"""What every transport must do alike: bits, fences, kept connections; and how one of them is chosen."""

from __future__ import annotations

import errno
import gc
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path

import pytest

from shared.errors import BackendError, DigestMismatch, ManifestMismatch, ReservationGone
from shared.kv.batch import Batch
from shared.kv.book import Received
from shared.kv.layout import BlobLayout
from shared.kv.limits import ReceiveLimits
from shared.kv.manifest import Manifest
from shared.kv.outgoing import Send, SendTimeouts
from shared.kv.pieces import ChunkBytes, Scratch
from shared.kv.progress import FirstTokens, Progress, TransferCancelled
from shared.kv.sender import KvSender
from shared.kv.shape import ITEMSIZE_BYTES, KvDtype, KvShape
from shared.kv.source import KvSource
from shared.kv.stream import Stream
from shared.kv.trailer import Trailer
from shared.wire import Sent
from tests.unit.shared.kv.blobs import SHAPE, Pool, expected, first_tokens, manifest_for
from tests.unit.shared.kv.book import OneReservation
from tests.unit.shared.kv.conftest import SECRET, Listen, Listening, SenderOver
from tests.unit.shared.kv.transfer import (
    BIG,
    TRANSPORTS,
    WAIT_S,
    finished,
    granted,
    reservation,
    sender_over,
    told_name,
    transport_of,
)


@pytest.fixture(params=TRANSPORTS)
def name(request: pytest.FixtureRequest) -> str:
    """Each transport in turn."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _nothing_left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """No descriptor and no mapping of a segment outlives a test; NIXL keeps its own while a peer is known."""
    if "name" in request.fixturenames and request.getfixturevalue("name") == "nixl":
        yield
        return
    gc.collect()
    before = open_descriptors()
    yield
    gc.collect()
    assert before == open_descriptors()
    assert not mapped_segments()


def open_descriptors() -> int:
    """How many this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def mapped_segments() -> list[str]:
    """Lines of this process's memory map that are segments, or mappings of a pool to read."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "handoff-kv" in line or ("handoff-pool" in line and " r--s " in line)]


def put(
    sender: KvSender, listening: Listening, manifest: Manifest, source: KvSource, progress: Progress
) -> Sent:
    """One PUT to a listener over whatever the sender prefers."""
    handoff = granted(listening.listener.offer("127.0.0.1"))
    return sender.send(Send(handoff, "r1", manifest, source, progress))


@pytest.mark.parametrize("dtype", list(ITEMSIZE_BYTES))
@pytest.mark.parametrize("block_sizes", list(product((1, 16, 256), repeat=2)))
def test_kv_arrives_bit_for_bit(
    listen: Listen, name: str, sender_to: SenderOver, dtype: KvDtype, block_sizes: tuple[int, int]
) -> None:
    """Whatever the dtype and whatever block sizes the two sides have; and all other memory stays as it was."""
    shape = KvShape(num_layers=2, num_kv_heads=2, head_dim=16, dtype=dtype)
    want = expected(num_tokens=300, from_token=5, shape=shape, num_choices=3)
    book = OneReservation(want, Pool(shape, num_tokens=300, block_size=block_sizes[1], seed=2))
    before = book.pool.snapshot()
    listening = listen(book)
    source = Pool(shape, num_tokens=300, block_size=block_sizes[0], seed=1)
    with closing(sender_to(source)) as sender:
        stats = put(sender, listening, manifest_for(want, chunk_size=128), source.views(), finished(3))
    report = listening.next_report()
    assert [report.received] == book.committed
    assert Received(first_tokens(3), stats.kv_bytes, stats.wire_bytes) == report.received
    assert (200, told_name(name), told_name(name)) == (report.status, report.transport, stats.transport)
    assert source.content(5) == book.pool.content(5)
    book.pool.erase(5)
    assert book.pool.erased(before, 5) == book.pool.snapshot()


def test_nothing_to_send_is_a_whole_handoff(listen: Listen, name: str, sender_to: SenderOver) -> None:
    """Where decode holds all KV already, the first PUT of a connection succeeds, and the next one carries KV.

    Over NIXL the first one failed, with 422: its introduction was looked for within a chunk.
    """
    book = reservation(expected(from_token=10))
    listening = listen(book)
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    before = book.pool.snapshot()
    with closing(sender_to(source)) as sender:
        sent = put(sender, listening, manifest_for(book.want), source.views(), finished())
        report = listening.next_report()
        assert [Received(first_tokens(1), 0, sent.wire_bytes)] == book.committed
        assert (200, told_name(name)) == (report.status, report.transport)
        assert before == book.pool.snapshot()
        book.committed.clear()
        book.want = expected()
        put(sender, listening, manifest_for(book.want), source.views(), finished())
        assert 1 == listening.listener.num_connections
    assert source.content() == book.pool.content()


def test_more_kv_than_any_buffer_holds(listen: Listen, sender_to: SenderOver) -> None:
    """KV of several times the ring and the socket buffers flows through them."""
    want = expected(num_tokens=400, shape=BIG)
    book = reservation(want)
    source = Pool(BIG, num_tokens=400, block_size=16, seed=1)
    with closing(sender_to(source)) as sender:
        put(sender, listen(book), manifest_for(want, chunk_size=0), source.views(), finished())
    assert source.content() == book.pool.content()
    assert want.num_tokens * BIG.bytes_per_token > 2 * 4 * 1024 * 1024


def test_chunks_travel_while_later_ones_compute(listen: Listen, sender_to: SenderOver) -> None:
    """A computed chunk arrives before the next one is computed."""
    book = reservation()
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    progress = Progress()
    with closing(sender_to(source)) as sender, ThreadPoolExecutor() as threads:
        sending = threads.submit(
            put, sender, listen(book), manifest_for(expected()), source.views(), progress
        )
        for computed, filled in ((4, [(0, 4)]), (9, [(0, 4), (4, 8)])):
            progress.advance(computed)
            assert book.chunk_arrived.acquire(timeout=WAIT_S)
            assert filled == book.filled
        progress.finish([100], [False])
        assert sending.result(WAIT_S).hidden_s > 0
    assert source.content() == book.pool.content()


def test_one_connection_serves_many_puts(listen: Listen, sender_to: SenderOver) -> None:
    """A connection, and its segment, is kept for the next hand-off; each arrives whole."""
    want = expected(num_tokens=300, shape=BIG)
    book = reservation(want)
    listening = listen(book)
    source = Pool(BIG, num_tokens=300, block_size=16, seed=0)
    with closing(sender_to(source)) as sender:
        for seed in range(5):
            source.refill(seed)
            put(sender, listening, manifest_for(want), source.views(), finished())
            listening.next_report()
            assert source.content() == book.pool.content()
            book.committed.clear()
            assert 1 == listening.listener.num_connections


def test_a_kept_connection_may_have_gone(listen: Listen, sender_to: SenderOver) -> None:
    """If the peer has closed it in the meantime, the hand-off goes over a new one."""
    book = reservation()
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    listening = listen(book, ReceiveLimits(keep_s=0.0))
    with closing(sender_to(source)) as sender:
        for _ in range(3):
            put(sender, listening, manifest_for(expected()), source.views(), finished())
            listening.next_report()
            book.committed.clear()


def test_a_waiting_connection_makes_room(listen: Listen, sender_to: SenderOver) -> None:
    """A connection that only waits for another PUT does not keep a new peer out."""
    book = reservation()
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    listening = listen(book, ReceiveLimits(max_connections=1))
    with closing(sender_to(source)) as first, closing(sender_to(source)) as second:
        for sender in (first, second, first):
            put(sender, listening, manifest_for(expected()), source.views(), finished())
            listening.next_report()
            listening.at_rest()
            book.committed.clear()


@pytest.mark.parametrize("said", [b"", b"PUT /v1/kv/h1 HTTP/1.1\r\n"])
def test_strangers_do_not_keep_peers_out(listen: Listen, sender_to: SenderOver, said: bytes) -> None:
    """Connections that show no ticket give way, the oldest first, and hear 503; no peer's PUT is lost.

    Some that said nothing, a port scanner's for example, kept every hand-off out for ten seconds.
    """
    book = reservation()
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    listening = listen(book, ReceiveLimits(max_connections=2))
    with ExitStack() as stack:
        sender = stack.enter_context(closing(sender_to(source)))
        for number in range(4):
            strangers = [socket.create_connection(("127.0.0.1", listening.port)) for _ in range(5)]
            for stranger in strangers:
                stack.enter_context(stranger)
                stranger.settimeout(WAIT_S)
                stranger.sendall(said)
            assert strangers[0].recv(1024).startswith(b"HTTP/1.1 503 ")
            put(sender, listening, manifest_for(expected()), source.views(), finished())
            assert number + 1 == book.settled()[0]
            book.committed.clear()


def test_a_waiting_connection_makes_room_for_descriptors(
    listen: Listen, sender_to: SenderOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When no peer can be accepted for want of descriptors, those of a connection that only waits are given back.

    It kept them for as long as it would have been kept, and new peers stood in the backlog.
    """
    book = reservation()
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    listening = listen(book)
    accept = socket.socket.accept

    def short_of_descriptors(sock: socket.socket) -> tuple[socket.socket, object]:
        if listening.listener.num_connections:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(sock)

    with closing(sender_to(source)) as first, closing(sender_to(source)) as second:
        put(first, listening, manifest_for(expected()), source.views(), finished())
        listening.next_report()
        book.committed.clear()
        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "accept", short_of_descriptors)
            put(second, listening, manifest_for(expected()), source.views(), finished())
        listening.next_report()


def test_gone_reservation_is_refused(listen: Listen, sender_to: SenderOver) -> None:
    """410, nothing written."""
    book = reservation()
    book.gone = True
    before = book.pool.snapshot()
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    with closing(sender_to(source)) as sender, pytest.raises(ReservationGone):
        put(sender, listen(book), manifest_for(expected()), source.views(), finished())
    assert before == book.pool.snapshot()


def test_foreign_manifest_is_refused(listen: Listen, sender_to: SenderOver) -> None:
    """409, nothing written."""
    book = reservation(expected(num_tokens=11))
    before = book.pool.snapshot()
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    with closing(sender_to(source)) as sender, pytest.raises(ManifestMismatch):
        put(sender, listen(book), manifest_for(expected()), source.views(), finished())
    assert before == book.pool.snapshot()
    assert (1, 1) == book.settled()


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_damage_is_found(listen: Listen, over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """422 when a byte changes after it was digested; the reservation stays open for a better copy.

    In a ring the digest is of the copy that the receiver reads, so there a change of the pool cannot show.
    """
    book = reservation()
    listening = listen(book)
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    send_all = Stream.send_all
    first = source.views().views(0, "k", 0, 1)[0]

    def damaged(stream: Stream, buffers: Sequence[memoryview], deadline: float) -> None:
        """The first batch is larger than any head and trailer."""
        if sum(map(len, buffers)) == 4 * SHAPE.bytes_per_token and not harmed.is_set():
            harmed.set()
            first[0] ^= 1
        send_all(stream, buffers, deadline)

    harmed = threading.Event()
    with closing(sender_over(over)) as sender, monkeypatch.context() as patched:
        patched.setattr(Stream, "send_all", damaged)
        with pytest.raises(DigestMismatch, match=re.escape("chunk.0000.layer.00.k")):
            put(sender, listening, manifest_for(expected()), source.views(), finished())
        assert not book.committed
        put(sender, listening, manifest_for(expected()), source.views(), finished())
    assert source.content() == book.pool.content()


def test_every_way_verifies_digests(
    listen: Listen, sender_to: SenderOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """422 if one bit of any digest differs from that of what has come; the reservation stays open."""
    book = reservation()
    listening = listen(book)
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    manifest = manifest_for(expected())
    num_digests = BlobLayout(manifest).num_digests
    with closing(sender_to(source)) as sender:
        for number in range(num_digests):
            with monkeypatch.context() as patched:
                patched.setattr(Trailer, "of", with_another_digest(number))
                with pytest.raises(DigestMismatch):
                    put(sender, listening, manifest, source.views(), finished())
            assert not book.committed
        put(sender, listening, manifest, source.views(), finished())
    assert source.content() == book.pool.content()
    assert (num_digests + 1, num_digests + 1) == book.settled()


def with_another_digest(number: int) -> Callable[[Trailer, FirstTokens], bytes]:
    """`Trailer.of` that tells one digest wrongly."""
    right = Trailer.of

    def wrong(trailer: Trailer, first: FirstTokens) -> bytes:
        content = bytearray(right(trailer, first))
        content[9 * len(first.token_ids) + 8 * number] ^= 1
        return bytes(content)

    return wrong


@pytest.mark.parametrize("name", ["shm", "nixl"])
def test_a_block_that_changes_after_it_was_read_is_found(
    listen: Listen, sender_to: SenderOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """422 where decode has read other bytes than prefill then digests: the block was given to another sequence."""
    book = reservation()
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    first = source.views().views(0, "k", 0, 1)[0]
    digest_left = ChunkBytes.digest_left
    changed = threading.Event()

    def late(chunk: ChunkBytes, batch: Batch, scratch: Scratch, *, through_caches: bool) -> None:
        if not changed.is_set():
            assert book.chunk_arrived.acquire(timeout=WAIT_S)
            first[0] ^= 1
            changed.set()
        digest_left(chunk, batch, scratch, through_caches=through_caches)

    listening = listen(book)
    with closing(sender_to(source)) as sender:
        with monkeypatch.context() as patched:
            patched.setattr(ChunkBytes, "digest_left", late)
            with pytest.raises(DigestMismatch, match=re.escape("chunk.0000.layer.00.k")):
                put(sender, listening, manifest_for(expected()), source.views(), finished())
        assert not book.committed
        put(sender, listening, manifest_for(expected()), source.views(), finished())
    assert source.content() == book.pool.content()


def test_cancel_by_decode(listen: Listen, sender_to: SenderOver) -> None:
    """Cancelling the reservation in mid-transfer stops the receiver, and the sender is told 410."""
    book = reservation()
    progress = Progress()
    progress.advance(4)
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    with closing(sender_to(source)) as sender, ThreadPoolExecutor() as threads:
        sending = threads.submit(
            put, sender, listen(book), manifest_for(expected()), source.views(), progress
        )
        assert book.chunk_arrived.acquire(timeout=WAIT_S)
        book.cancel()
        assert book.released.wait(WAIT_S)
        before = book.pool.snapshot()
        progress.finish([100], [False])
        with pytest.raises(ReservationGone):
            sending.result(WAIT_S)
    assert before == book.pool.snapshot()


def test_cancel_by_prefill(listen: Listen, sender_to: SenderOver) -> None:
    """Cancelling the progress in mid-transfer ends the send at once, and the claim is released."""
    book = reservation()
    progress = Progress()
    progress.advance(4)
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    listening = listen(book)
    with closing(sender_to(source)) as sender, ThreadPoolExecutor() as threads:
        sending = threads.submit(put, sender, listening, manifest_for(expected()), source.views(), progress)
        assert book.chunk_arrived.acquire(timeout=WAIT_S)
        progress.cancel("client gone")
        with pytest.raises(TransferCancelled):
            sending.result(WAIT_S)
        listening.next_report()
    assert book.released.is_set()
    assert not book.committed


def test_stuck_receiver_times_out(listen: Listen, sender_to: SenderOver) -> None:
    """A receiver that takes nothing more is given up after io_s, in the middle of a chunk too."""
    want = expected(num_tokens=400, shape=BIG)
    book = reservation(want)
    release = threading.Event()
    taken = book.claim

    class Stuck:
        """Delegates to the claim, but its sink blocks."""

        def __init__(self, claim: object) -> None:
            self._claim = claim
            self.sink = self

        def __getattr__(self, field: str) -> object:
            return getattr(self._claim, field)

        def views(self, *_: object) -> list[memoryview]:
            release.wait(WAIT_S)
            raise BackendError("enough")

    book.claim = lambda ticket: Stuck(taken(ticket))  # type: ignore[assignment, method-assign, return-value]
    source = Pool(BIG, num_tokens=400, block_size=16, seed=1)
    listening = listen(book)
    with closing(sender_to(source, SendTimeouts(io_s=0.1))) as sender:
        with pytest.raises(BackendError):
            put(sender, listening, manifest_for(want), source.views(), finished())
        release.set()
        listening.next_report()


@pytest.mark.parametrize(
    ("preferred", "offered", "used"),
    [
        (("shm", "unix", "tcp"), ("shm", "unix", "tcp"), "shm"),
        (("shm", "unix", "tcp"), ("unix", "tcp"), "unix"),
        (("tcp", "shm"), ("shm", "unix", "tcp"), "tcp"),
        (("shm", "tcp"), ("tcp",), "tcp"),
        (("shm", "tcp"), ("rdma", "tcp"), "tcp"),
    ],
)
def test_the_first_transport_that_both_want_is_used(
    listen: Listen, preferred: tuple[str, ...], offered: tuple[str, ...], used: str
) -> None:
    """The sender's order, among what the reservation offers; a name that it does not know is no error."""
    book = reservation()
    handoff = granted(listen(book).listener.offer("127.0.0.1"), offered)
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    with closing(sender_over(*preferred, pool=source)) as sender:
        stats = sender.send(Send(handoff, "r1", manifest_for(expected()), source.views(), finished()))
    assert used == stats.transport


def test_nothing_in_common_is_an_error(listen: Listen) -> None:
    """Said at once and in words."""
    book = reservation()
    handoff = granted(listen(book).listener.offer("127.0.0.1"), ("unix",))
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    with closing(sender_over("tcp")) as sender, pytest.raises(BackendError, match="no transport"):
        sender.send(Send(handoff, "r1", manifest_for(expected()), source.views(), finished()))


def test_another_host_is_reached_over_tcp(listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another boot, or another network namespace, is another host."""
    book = reservation()
    offer = listen(book).listener.offer("127.0.0.1")
    monkeypatch.setattr("shared.kv.transports.unix.host_id", lambda: "elsewhere")
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    with closing(sender_over("shm", "ring", "unix", "tcp", pool=source)) as sender:
        stats = sender.send(Send(granted(offer), "r1", manifest_for(expected()), source.views(), finished()))
    assert "tcp" == stats.transport


def test_the_memory_of_rings_is_bounded(listen: Listen) -> None:
    """When all of it is in use, the next transport is taken; what only waits in a kept connection is given back."""
    book = reservation()
    listening = listen(book)
    handoff = granted(listening.listener.offer("127.0.0.1"))
    source = Pool(book.want.shape, num_tokens=10, seed=1)
    transports = [transport_of("ring", shm_bytes=4 << 20), transport_of("unix")]
    with (
        closing(KvSender(SECRET, transports, SendTimeouts())) as sender,
        ThreadPoolExecutor() as threads,
    ):
        progress = Progress()
        progress.advance(4)
        first = threads.submit(
            sender.send, Send(handoff, "r1", manifest_for(expected()), source.views(), progress)
        )
        assert book.chunk_arrived.acquire(timeout=WAIT_S)
        other = reservation()
        there = granted(listen(other).listener.offer("127.0.0.1"))
        during = sender.send(Send(there, "r2", manifest_for(expected()), source.views(), finished()))
        progress.finish([1], [False])
        assert ("shm", "unix") == (first.result(WAIT_S).transport, during.transport)
        other.committed.clear()
        after = sender.send(Send(there, "r3", manifest_for(expected()), source.views(), finished()))
        assert "shm" == after.transport
