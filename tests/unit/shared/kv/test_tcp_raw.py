"""The KV listener against peers that are no sender of ours: wrong forms, slow bodies, damage on the wire."""

from __future__ import annotations

import socket
from collections.abc import Callable

import orjson
import pytest

from shared.kv.limits import ReceiveLimits
from shared.kv.ticket import Ticket, kv_url
from tests.unit.shared.kv.blobs import SHAPE, Pool, encode, expected, manifest_for
from tests.unit.shared.kv.book import BOOT, OneReservation
from tests.unit.shared.kv.conftest import SECRET, Listen, Listening

BLOB = encode(manifest_for(expected()), Pool(SHAPE, num_tokens=10, seed=1))
FAST = ReceiveLimits(head_s=0.1, idle_s=0.1, grace_s=0.1, floor_bytes_per_s=1e9)


def ticket(**changes: object) -> str:
    """A ticket for h1, or with one field changed."""
    fields = {"handoff_id": "h1", "epoch": 7, "kv_url": kv_url("d", 1, "h1"), "boot": BOOT, "expires_at": 9.0}
    return Ticket(**(fields | changes)).sign(SECRET)  # type: ignore[arg-type]


def head(**changes: str | None) -> bytes:
    """The head of a right PUT, with headers changed or (None) left out; `line` replaces the request line."""
    line = changes.pop("line", None) or "PUT /v1/kv/h1 HTTP/1.1"
    headers: dict[str, str | None] = {
        "Host": "d",
        "Content-Length": str(len(BLOB)),
        "X-Handoff-Ticket": ticket(),
    }
    headers |= {name.replace("_", "-"): value for name, value in changes.items()}
    lines = [line, *(f"{name}: {value}" for name, value in headers.items() if value)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def exchange(listening: Listening, *pieces: bytes, half_close: bool = False) -> tuple[int, dict[str, object]]:
    """Send the pieces, read the answer to its end."""
    with socket.create_connection(("127.0.0.1", listening.port), timeout=10) as sock:
        for piece in pieces:
            sock.sendall(piece)
        if half_close:
            sock.shutdown(socket.SHUT_WR)
        answer = b""
        while data := sock.recv(65536):
            answer += data
    top, _, body = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), orjson.loads(body)


def fresh() -> OneReservation:
    """A reservation of ten tokens."""
    return OneReservation(expected(), Pool(SHAPE, num_tokens=10))


def test_plain_http_client_is_enough(listen: Listen) -> None:
    """Head and body in one piece, or byte by byte: the same blob is taken."""
    for pieces in ([head() + BLOB], [head(), BLOB], [bytes([byte]) for byte in head() + BLOB]):
        book = fresh()
        status, body = exchange(listen(book), *pieces)
        assert (200, len(BLOB)) == (status, body["wire_bytes"])
        assert Pool(SHAPE, num_tokens=10, seed=1).content() == book.pool.content()


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (head(line="PUT /v1/kv/ HTTP/1.1"), 404),
        (head(line="PUT /v1/kv/h1/x HTTP/1.1"), 404),
        (head(line="PUT /v1/kv/h1?x=1 HTTP/1.1"), 404),
        (head(line="GET / HTTP/1.1"), 404),
        (head(line="POST /v1/kv/h1 HTTP/1.1"), 405),
        (head(Content_Length=None), 411),
        (head(Content_Length=None, Transfer_Encoding="chunked"), 411),
        (head(Content_Length="-1"), 400),
        (head(Content_Length="1, 2"), 400),
        (head(Content_Length=str(10**12)), 413),
        (head(Content_Length="100"), 409),
        (head(Content_Length="0"), 409),
        (head(Content_Length=str(len(BLOB) + 1)), 409),
        (head(X_Handoff_Ticket=None), 401),
        (head(X_Handoff_Ticket="forged"), 401),
        (head(X_Handoff_Ticket=ticket() + "A"), 401),
        (head(X_Handoff_Ticket=ticket(handoff_id="h2")), 401),
        (head(X_Handoff_Ticket=ticket(boot="boot0")), 410),
        (head(X_Handoff_Ticket=ticket(expires_at=-1.0)), 410),
        (head(X_Long="x" * 20_000), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"PUT\r\n\r\n", 400),
    ],
)
def test_wrong_requests_are_told_why(listen: Listen, request_head: bytes, status: int) -> None:
    """Each wrong request has its own status and a JSON error, writes nothing, and leaves no claim behind."""
    book = fresh()
    before = book.pool.snapshot()
    answered, body = exchange(listen(book), request_head + BLOB)
    assert status == answered
    assert isinstance(body["code"], str)
    assert isinstance(body["message"], str)
    assert before == book.pool.snapshot()
    num_claims, num_releases = book.settled()
    assert num_claims == num_releases


def test_damage_on_the_wire_is_422(listen: Listen) -> None:
    """A flipped bit of KV is a digest mismatch; nothing is committed and the reservation lives."""
    book = fresh()
    listening = listen(book)
    damaged = bytearray(BLOB)
    damaged[-200] ^= 1
    status, body = exchange(listening, head() + damaged)
    assert (422, "digest_mismatch") == (status, body["code"])
    assert not book.committed
    assert 200 == exchange(listening, head() + BLOB)[0]


def test_cut_body_is_400(listen: Listen) -> None:
    """A body that ends early is refused; the reservation can be filled by another try."""
    book = fresh()
    listening = listen(book)
    assert 400 == exchange(listening, head() + BLOB[:-1], half_close=True)[0]
    assert 200 == exchange(listening, head() + BLOB)[0]


@pytest.mark.parametrize(
    "sent",
    [lambda: b"PUT /v1", lambda: head(), lambda: head() + BLOB[:100], lambda: head() + BLOB[:-1]],
)
def test_slow_peer_is_408(listen: Listen, sent: Callable[[], bytes]) -> None:
    """A peer that stops in its head, before a section or within one, is given up in its time."""
    book = fresh()
    status, body = exchange(listen(book, FAST), sent())
    assert (408, "the request came too slowly") == (status, body["message"])
    num_claims, num_releases = book.settled()
    assert num_claims == num_releases
    assert not book.committed


def test_peer_that_leaves_is_not_answered(listen: Listen) -> None:
    """A peer that connects and goes costs one report and no thread."""
    listening = listen(fresh())
    socket.create_connection(("127.0.0.1", listening.port)).close()
    assert 0 == listening.next_report().status


def test_expect_continue(listen: Listen) -> None:
    """A client that waits for our word before its body gets it, but only if the reservation is there."""
    listening = listen(fresh())
    with socket.create_connection(("127.0.0.1", listening.port), timeout=10) as sock:
        sock.sendall(head(Expect="100-continue"))
        assert b"HTTP/1.1 100 Continue\r\n\r\n" == sock.recv(1000)
        sock.sendall(BLOB)
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
    assert 410 == exchange(listening, head(Expect="100-continue"))[0]


def test_request_id_is_cleaned(listen: Listen) -> None:
    """A request id that could harm a log is dropped from the report."""
    listening = listen(fresh())
    exchange(listening, head(X_Request_Id='a b"c') + BLOB)
    assert listening.next_report().request_id is None


def test_last_word_survives_a_sender_that_does_not_listen(listen: Listen) -> None:
    """A client that writes on after the refusal still reads it: what it sent is drained, not reset."""
    book = fresh()
    book.gone = True
    patient = ReceiveLimits(answer_s=10)
    status, body = exchange(listen(book, patient), head(), BLOB, bytes(2_000_000), half_close=True)
    assert (410, "reservation_gone") == (status, body["code"])
