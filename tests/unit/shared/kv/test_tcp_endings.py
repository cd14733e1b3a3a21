"""Transfers that end early: cancelled, aborted, refused, timed out, closed. The right error, and nothing left."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.errors import (
    BackendError,
    BackendTimeout,
    DigestMismatch,
    ReservationGone,
    ServingError,
    Unavailable,
)
from shared.kv.outgoing import SendTimeouts
from shared.kv.progress import Progress, TransferCancelled
from tests.unit.shared.kv.blobs import SHAPE, Pool, expected, manifest_for
from tests.unit.shared.kv.book import OneClaim
from tests.unit.shared.kv.conftest import Listen
from tests.unit.shared.kv.transfer import (
    BIG,
    WAIT_S,
    Watched,
    finished,
    reservation,
    send,
    start_sending,
)


def test_cancelled_reservation_stops_the_receive(listen: Listen) -> None:
    """Cancel in mid-transfer: the claim is released at once, nothing is written after, and the sender hears 410."""
    book = reservation()
    listening = listen(book)
    source = Pool(SHAPE, num_tokens=10, seed=1)
    progress = Progress()
    with ThreadPoolExecutor() as threads:
        sending = start_sending(threads, listening, source.views(), progress)
        assert book.chunk_arrived.acquire(timeout=WAIT_S)
        book.cancel()
        assert book.released.wait(WAIT_S)
        at_release = book.pool.snapshot()
        assert 410 == listening.next_report().status
        progress.advance(10)
        with pytest.raises(ReservationGone):
            sending.result(WAIT_S)
    assert at_release == book.pool.snapshot()
    assert [(0, 4)] == book.filled
    assert (1, 1) == book.settled()


def test_sender_cancel_while_waiting_for_compute(listen: Listen) -> None:
    """Cancel between chunks ends the send; the receiver sees a cut blob, and the reservation lives."""
    book = reservation()
    listening = listen(book)
    source = Pool(SHAPE, num_tokens=10, seed=1)
    progress = Progress()
    with ThreadPoolExecutor() as threads:
        sending = start_sending(threads, listening, source.views(), progress)
        assert book.chunk_arrived.acquire(timeout=WAIT_S)
        progress.cancel("the client left")
        with pytest.raises(TransferCancelled, match="the client left"):
            sending.result(WAIT_S)
    assert listening.next_report().status in (0, 400)
    assert not book.committed
    send(listening.port, manifest_for(expected()), source.views(), finished())
    assert source.content() == book.pool.content()


def test_sender_cancel_breaks_a_blocked_send() -> None:
    """Cancel reaches a sender whose peer reads nothing."""
    want = expected(num_tokens=1000, shape=BIG)
    source = Watched(Pool(BIG, num_tokens=1000, seed=1))
    progress = finished()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as threads:
        sending = threads.submit(send, server.getsockname()[1], manifest_for(want), source, progress)
        assert source.asked.wait(WAIT_S)
        progress.cancel("the client left")
        with pytest.raises(TransferCancelled):
            sending.result(WAIT_S)


def test_cancel_before_the_send() -> None:
    """A hand-off that was cancelled before it began connects to nobody."""
    progress = Progress()
    progress.cancel("the client left")
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(TransferCancelled):
            send(
                server.getsockname()[1],
                manifest_for(expected()),
                Pool(SHAPE, num_tokens=10).views(),
                progress,
            )
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_refused_connection_is_a_backend_error() -> None:
    """No listener: BackendError, at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(BackendError):
        send(port, manifest_for(expected()), Pool(SHAPE, num_tokens=10).views(), finished())


@pytest.mark.parametrize("num_tokens", [10, 1000])
def test_deaf_peer_is_a_timeout(num_tokens: int) -> None:
    """A peer that accepts but neither reads nor answers: BackendTimeout, for small KV and for KV that blocks."""
    want = expected(num_tokens=num_tokens, shape=BIG)
    source = Pool(BIG, num_tokens=num_tokens, seed=1).views()
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(BackendTimeout):
        send(
            server.getsockname()[1], manifest_for(want), source, finished(), timeouts=SendTimeouts(io_s=0.05)
        )


def test_stuck_prefill_is_a_timeout(listen: Listen) -> None:
    """A chunk that is never computed ends the send in its time."""
    with pytest.raises(BackendTimeout, match="prefill"):
        send(
            listen(reservation()).port,
            manifest_for(expected()),
            Pool(SHAPE, num_tokens=10).views(),
            Progress(),
            timeouts=SendTimeouts(compute_s=0.05),
        )


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", BackendError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{}", BackendError),
        (b"HTTP/1.1 500 No\r\nContent-Length: 4\r\n\r\noops", BackendError),
        (b"nonsense\r\n\r\n", BackendError),
        (
            b'HTTP/1.1 400 No\r\nContent-Length: 43\r\n\r\n{"code":"invalid_request","message":"odd"}   ',
            BackendError,
        ),
        (
            b'HTTP/1.1 503 No\r\nContent-Length: 41\r\n\r\n{"code":"unavailable","message":"later"}   ',
            Unavailable,
        ),
        (
            b'HTTP/1.1 422 No\r\nContent-Length: 43\r\n\r\n{"code":"digest_mismatch","message":"bad"}   ',
            DigestMismatch,
        ),
    ],
)
def test_answers_become_errors(answer: bytes, error: type[ServingError]) -> None:
    """Each answer of a peer, also one that comes before the body was read, becomes the one right error."""
    want = expected(num_tokens=1000, shape=BIG)
    source = Pool(BIG, num_tokens=1000, seed=1).views()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as threads:
        sending = threads.submit(send, server.getsockname()[1], manifest_for(want), source, finished())
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            with pytest.raises(ServingError) as caught:
                sending.result(WAIT_S)
    assert error is type(caught.value)


def test_close_ends_what_is_in_flight(listen: Listen) -> None:
    """Closing the listener ends a receive with 503, releases its claim, and may be repeated."""
    book = reservation()
    listening = listen(book)
    progress = Progress()
    with ThreadPoolExecutor() as threads:
        sending = start_sending(threads, listening, Pool(SHAPE, num_tokens=10, seed=1).views(), progress)
        assert book.chunk_arrived.acquire(timeout=WAIT_S)
        assert listening.listener.close()
        assert book.released.is_set()
        progress.finish([100], [False])
        with pytest.raises(Unavailable):
            sending.result(WAIT_S)
    assert listening.listener.close()
    assert 0 == listening.listener.num_connections


def test_the_answer_comes_before_the_release(listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one core an answer would wait for the step that an engine computes as soon as it is told."""
    book = reservation()
    listening = listen(book)
    answered = threading.Event()
    release = OneClaim.release
    in_time = []

    def late(claim: OneClaim) -> None:
        in_time.append(answered.wait(WAIT_S))
        release(claim)

    monkeypatch.setattr(OneClaim, "release", late)
    send(listening.port, manifest_for(expected()), Pool(SHAPE, num_tokens=10, seed=1).views(), finished())
    answered.set()
    assert 200 == listening.next_report().status
    assert [True] == in_time
