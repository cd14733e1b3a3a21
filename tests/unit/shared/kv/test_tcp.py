"""Sender and listener over real sockets: what arrives, and what is refused."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from shared.errors import (
    BackendError,
    HandoffError,
    ManifestMismatch,
    ReservationGone,
    Unauthorized,
    Unavailable,
)
from shared.kv.book import Received
from shared.kv.limits import ReceiveLimits
from shared.kv.outgoing import Send, SendTimeouts
from shared.kv.progress import Progress
from shared.kv.sender import KvSender
from shared.kv.ticket import kv_url
from shared.kv.transports.tcp import TcpTransport
from tests.unit.shared.kv.blobs import SHAPE, Pool, expected, first_tokens, manifest_for
from tests.unit.shared.kv.conftest import SECRET, Listen
from tests.unit.shared.kv.transfer import (
    BIG,
    WAIT_S,
    finished,
    grant,
    reservation,
    send,
    start_sending,
)


@pytest.mark.parametrize("from_token", [0, 5, 10])
def test_kv_and_first_tokens_arrive(listen: Listen, from_token: int) -> None:
    """KV arrives bit for bit, first tokens and flags with it, and both sides count the same bytes."""
    want = expected(from_token=from_token, num_choices=3)
    book = reservation(want)
    listening = listen(book)
    source = Pool(SHAPE, num_tokens=10, block_size=3, seed=1)
    stats = send(listening.port, manifest_for(want), source.views(), finished(3))
    report = listening.next_report()
    assert [report.received] == book.committed
    assert Received(first_tokens(3), stats.kv_bytes, stats.wire_bytes) == report.received
    assert (10 - from_token) * SHAPE.bytes_per_token == stats.kv_bytes
    assert source.content(from_token) == book.pool.content(from_token)
    assert (200, "h1", "r1", None) == (report.status, report.handoff_id, report.request_id, report.error)
    assert (1, 1) == book.settled()


def test_chunks_travel_while_later_ones_compute(listen: Listen) -> None:
    """A computed chunk arrives before the next one is computed, and that time counts as hidden."""
    book = reservation()
    listening = listen(book)
    source = Pool(SHAPE, num_tokens=10, seed=1)
    progress = Progress()
    with ThreadPoolExecutor() as threads:
        sending = threads.submit(send, listening.port, manifest_for(expected()), source.views(), progress)
        for computed, filled in ((4, [(0, 4)]), (9, [(0, 4), (4, 8)])):
            progress.advance(computed)
            assert book.chunk_arrived.acquire(timeout=WAIT_S)
            assert filled == book.filled
        assert not book.committed
        progress.finish([100], [False])
        stats = sending.result(WAIT_S)
    assert source.content() == book.pool.content()
    assert stats.hidden_s > 0
    assert stats.transfer_s >= 0


def test_large_kv_with_small_socket_steps(listen: Listen) -> None:
    """KV much larger than any socket buffer, and of many blocks, arrives bit for bit."""
    want = expected(num_tokens=300, shape=BIG)
    book = reservation(want)
    source = Pool(BIG, num_tokens=300, block_size=16, seed=1)
    send(listen(book).port, manifest_for(want, chunk_size=128), source.views(), finished())
    assert source.content() == book.pool.content()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fingerprint": "e" * 32}, "fingerprint"),
        ({"token_hash": "0" * 32}, "token_hash"),
        ({"epoch": 6}, "epoch"),
        ({"shape": replace(SHAPE, num_kv_heads=1, head_dim=8)}, "shape"),
    ],
)
def test_foreign_kv_is_409_and_the_reservation_lives(
    listen: Listen, change: dict[str, object], named: str
) -> None:
    """KV of something else is refused with the field's name, writes nothing, and another try may succeed."""
    book = reservation()
    listening = listen(book)
    before = book.pool.snapshot()
    foreign = replace(manifest_for(expected()), **change)  # type: ignore[arg-type]
    source = Pool(SHAPE, num_tokens=10, seed=1)
    with pytest.raises(ManifestMismatch, match=named):
        send(listening.port, foreign, source.views(), finished())
    assert 409 == listening.next_report().status
    assert before == book.pool.snapshot()
    send(listening.port, manifest_for(expected()), source.views(), finished())
    assert source.content() == book.pool.content()


def test_late_put_is_410_and_writes_nothing(listen: Listen) -> None:
    """A PUT to a reservation that was cancelled, or filled before, or from before a restart, writes nothing."""
    source = Pool(SHAPE, num_tokens=10, seed=1)
    manifest = manifest_for(expected())
    cancelled, filled = reservation(), reservation()
    cancelled.cancel()
    before = cancelled.pool.snapshot()
    with pytest.raises(ReservationGone):
        send(listen(cancelled).port, manifest, source.views(), finished())
    assert before == cancelled.pool.snapshot()

    port = listen(filled).port
    send(port, manifest, source.views(), finished())
    with pytest.raises(ReservationGone):
        send(port, manifest, Pool(SHAPE, num_tokens=10, seed=2).views(), finished())
    with pytest.raises(ReservationGone, match="restart"):
        send(port, manifest, source.views(), finished(), handoff=grant(port, boot="boot0"))
    assert source.content() == filled.pool.content()


@pytest.mark.parametrize("boot", ["forged", "other url"])
def test_sender_does_not_connect_without_a_valid_ticket(listen: Listen, boot: str) -> None:
    """A forged ticket, or one for another URL, is refused by the sender itself: nobody is connected to."""
    book = reservation()
    port = listen(book).port
    handoff = grant(port, secret=b"wrong") if boot == "forged" else grant(port)
    if boot == "other url":
        handoff = handoff.model_copy(update={"kv_url": kv_url("127.0.0.1", port, "h2")})
    with pytest.raises(Unauthorized):
        send(port, manifest_for(expected()), Pool(SHAPE, num_tokens=10).views(), finished(), handoff=handoff)
    assert 0 == book.num_claims


def test_second_put_at_the_same_time_is_409(listen: Listen) -> None:
    """While one PUT fills a reservation another one is refused; the first goes on undisturbed."""
    book = reservation()
    listening = listen(book)
    source = Pool(SHAPE, num_tokens=10, seed=1)
    progress = Progress()
    with ThreadPoolExecutor() as threads:
        sending = start_sending(threads, listening, source.views(), progress)
        assert book.chunk_arrived.acquire(timeout=WAIT_S)
        with pytest.raises(HandoffError, match="already") as caught:
            send(listening.port, manifest_for(expected()), source.views(), finished())
        assert HandoffError is type(caught.value)
        progress.finish([100], [False])
        sending.result(WAIT_S)
    assert source.content() == book.pool.content()


def test_too_many_connections_are_503(listen: Listen) -> None:
    """One connection more than the limit is refused at once; the served one is not disturbed."""
    book = reservation()
    listening = listen(book, ReceiveLimits(max_connections=1))
    source = Pool(SHAPE, num_tokens=10, seed=1)
    progress = Progress()
    with ThreadPoolExecutor() as threads:
        sending = start_sending(threads, listening, source.views(), progress)
        assert book.chunk_arrived.acquire(timeout=WAIT_S)
        with pytest.raises(Unavailable) as caught:
            send(listening.port, manifest_for(expected()), source.views(), finished())
        assert 1.0 == caught.value.retry_after_s
        progress.finish([100], [False])
        sending.result(WAIT_S)
    assert source.content() == book.pool.content()


def test_commit_may_still_refuse(listen: Listen) -> None:
    """A reservation gone in the last moment is 410, a bug of ours 500; the listener serves on after both."""
    source = Pool(SHAPE, num_tokens=10, seed=1)
    manifest = manifest_for(expected())
    failures = [ReservationGone("too late"), RuntimeError("a bug")]

    def commit(received: Received) -> None:
        if failures:
            raise failures.pop(0)

    book = reservation()
    book.on_commit = commit
    listening = listen(book)
    with pytest.raises(ReservationGone, match="too late"):
        send(listening.port, manifest, source.views(), finished())
    assert 410 == listening.next_report().status
    with pytest.raises(BackendError):
        send(listening.port, manifest, source.views(), finished())
    report = listening.next_report()
    assert (500, RuntimeError) == (report.status, type(report.error))
    send(listening.port, manifest, source.views(), finished())
    assert (3, 3) == book.settled()


def test_peers_that_come_at_once_take_the_places_of_idle_ones(listen: Listen) -> None:
    """And not each other's, though none of them has shown its ticket yet."""
    book = reservation()
    listening = listen(book, ReceiveLimits(max_connections=4))
    source = Pool(SHAPE, num_tokens=10, seed=1)
    senders = [KvSender(SECRET, [TcpTransport()], SendTimeouts()) for _ in range(4)]
    with ExitStack() as stack:
        for sender in senders:
            stack.callback(sender.close)
            sender.send(
                Send(grant(listening.port), "r1", manifest_for(expected()), source.views(), finished())
            )
            listening.next_report()
            listening.at_rest()
            book.committed.clear()
        # Silent as yet, as a sender is between its connection and its head.
        comers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", listening.port))) for _ in range(4)
        ]
        for comer in comers:
            comer.settimeout(0.2)
            with pytest.raises(TimeoutError):
                comer.recv(1)
