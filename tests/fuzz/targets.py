"""What a fuzzer feeds: whatever the bytes are, the receiving side takes or refuses them in a way that it knows.

Any other exception, KV written before the header was accepted, or a ticket or head that means something else than
what was sent, is a bug.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Mapping

from shared.errors import HandoffError, InvalidRequest, Unauthorized
from shared.kv.decoder import BlobDecoder
from shared.kv.http_head import read_head
from shared.kv.ticket import Ticket, kv_url
from tests.fuzz import bodies
from tests.fuzz.bodies import SHAPE, WANT, receive_of
from tests.unit.shared.kv.blobs import MAX_HEADER_BYTES, LoggedSink, Pool, encode, manifest_for

BLOB = encode(manifest_for(WANT), Pool(SHAPE, num_tokens=6, seed=1))
_SENT = Pool(SHAPE, num_tokens=6, seed=1).content()

_SECRET = b"the secret of the fuzzer"
TICKET = Ticket("h1", 7, kv_url("127.0.0.1", 1, "h1"), "boot", 100.0)
_HEAD = (
    b"PUT /v1/kv/h1 HTTP/1.1\r\nHost: handoff-decode\r\nConnection: keep-alive\r\nContent-Length: 1000\r\n"
    b"X-Handoff-Ticket: " + TICKET.sign(_SECRET).encode() + b"\r\n\r\nbody"
)


def blob(data: bytes) -> None:
    """Arrive as the body of a PUT whose Content-Length is right."""
    pool = Pool(SHAPE, num_tokens=6)
    before = pool.snapshot()
    asked: list[tuple[str, int, int]] = []
    sink = LoggedSink(pool.views(), asked)
    decoder = BlobDecoder(WANT, sink, total_bytes=len(data), max_header_bytes=MAX_HEADER_BYTES)
    try:
        decoder.read(receive_of(data))
    except (InvalidRequest, HandoffError):
        assert asked or before == pool.snapshot(), "KV was written before the header was accepted"
    else:
        assert len(BLOB) - _header_bytes(BLOB) == len(data) - _header_bytes(data), (
            "its length is not its header's"
        )
        assert data != BLOB or _SENT == pool.content()


def _header_bytes(data: bytes) -> int:
    return 8 + int(struct.unpack("<Q", data[:8])[0])


def ticket(data: bytes) -> None:
    """Arrive as the text of a ticket."""
    with contextlib.suppress(Unauthorized):
        read = Ticket.verify(data.decode("latin-1"), _SECRET)
        assert TICKET == read, "somebody else's ticket was accepted"


def head(data: bytes) -> None:
    """Arrive as the head of a request, then silence."""
    left = memoryview(data)

    def receive(buffer: memoryview, deadline: float) -> int:
        nonlocal left
        taken = min(len(left), len(buffer))
        buffer[:taken] = left[:taken]
        left = left[taken:]
        return taken

    with contextlib.suppress(InvalidRequest, ConnectionError):
        read, early = read_head(receive, 16 * 1024, deadline=0.0)
        assert data.endswith(early)
        assert not set("\r\n\0") & set("".join([read.method, read.target, *read.headers.values()]))


TARGETS: Mapping[str, tuple[Callable[[bytes], None], bytes]] = {
    "blob": (blob, BLOB),
    "ticket": (ticket, TICKET.sign(_SECRET).encode()),
    "head": (head, _HEAD),
    "quantised": (bodies.quantised, bodies.QUANTISED),
    "told": (bodies.told, bodies.TOLD),
    "introduction": (bodies.introduction, bodies.INTRODUCTION),
}
"""Name -> what is called, and a right input to begin with."""
