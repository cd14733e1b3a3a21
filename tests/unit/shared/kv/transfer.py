"""One PUT between real sockets, as the tests of the TCP transport start it."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from shared.kv.manifest import Expected, Manifest
from shared.kv.outgoing import Send, SendTimeouts
from shared.kv.progress import Progress
from shared.kv.receiver import Offer
from shared.kv.sender import KvSender
from shared.kv.shape import Kind, KvShape
from shared.kv.source import KvSource
from shared.kv.ticket import Ticket, kv_url
from shared.kv.transports.base import Transport
from shared.kv.transports.shm import ShmTransport
from shared.kv.transports.shm_ring import RingTransport, SegmentBudget
from shared.kv.transports.tcp import TcpTransport
from shared.kv.transports.unix import UnixTransport
from shared.wire import Handoff, Sent
from tests.unit.shared.kv.blobs import Pool, expected, first_tokens, manifest_for
from tests.unit.shared.kv.book import BOOT, OneReservation
from tests.unit.shared.kv.conftest import SECRET, Listening

WAIT_S = 10
BIG = KvShape(num_layers=8, num_kv_heads=8, head_dim=64, dtype="F32")


def grant(port: int, *, boot: str = BOOT, secret: bytes = SECRET) -> Handoff:
    """What a decode worker on this port hands out for reservation h1."""
    url = kv_url("127.0.0.1", port, "h1")
    ticket = Ticket("h1", 7, url, boot, expires_at=100.0).sign(secret)
    return Handoff(handoff_id="h1", epoch=7, kv_url=url, ticket=ticket, have_tokens=0)


def send(
    port: int,
    manifest: Manifest,
    source: KvSource,
    progress: Progress,
    *,
    handoff: Handoff | None = None,
    timeouts: SendTimeouts | None = None,
) -> Sent:
    """One PUT to a local port."""
    sender = KvSender(SECRET, [TcpTransport()], timeouts or SendTimeouts())
    try:
        return sender.send(Send(handoff or grant(port), "r1", manifest, source, progress))
    finally:
        sender.close()


def finished(num_choices: int = 1) -> Progress:
    """Progress of a prompt that is already computed."""
    progress = Progress()
    first = first_tokens(num_choices)
    progress.finish(first.token_ids, first.finished)
    return progress


def reservation(want: Expected | None = None) -> OneReservation:
    """A reservation with an empty pool."""
    want = want or expected()
    return OneReservation(want, Pool(want.shape, num_tokens=want.num_tokens))


# Of the two forms of shared memory, `ring` is that for a pool that no peer can map.
TRANSPORTS = ("nixl", "shm", "ring", "unix", "tcp")


def transport_of(name: str, pool: Pool | None = None, shm_bytes: int = 32 << 20) -> Transport:
    """One transport's sending side. pool: of all sources; `shm` needs it."""
    if name == "shm":
        assert pool is not None
        return ShmTransport(pool.memory)
    made: dict[str, Transport] = {
        "ring": RingTransport(SegmentBudget(shm_bytes)),
        "unix": UnixTransport(),
        "tcp": TcpTransport(),
    }
    return made[name]


def sender_over(*names: str, pool: Pool | None = None, timeouts: SendTimeouts | None = None) -> KvSender:
    """A sender that prefers these transports in this order. The caller closes it."""
    return KvSender(SECRET, [transport_of(name, pool) for name in names], timeouts or SendTimeouts())


def told_name(name: str) -> str:
    """What a transport is called in headers, logs and metrics."""
    return "shm" if name == "ring" else name


def granted(offer: Offer, transports: tuple[str, ...] | None = None) -> Handoff:
    """What the decode worker with this listener hands out for reservation h1."""
    url = offer.kv_url("h1")
    ticket = Ticket("h1", 7, url, BOOT, 100.0, host_id=offer.host_id, kv_socket=offer.kv_socket)
    return Handoff(
        handoff_id="h1",
        epoch=7,
        kv_url=url,
        ticket=ticket.sign(SECRET),
        have_tokens=0,
        transports=offer.transports if transports is None else transports,
    )


class Watched:
    """A source that tells when it is first asked."""

    def __init__(self, pool: Pool) -> None:
        self._views = pool.views()
        self.asked = threading.Event()

    def views(self, layer: int, kind: Kind, start: int, end: int) -> list[memoryview]:
        self.asked.set()
        return self._views.views(layer, kind, start, end)


def start_sending(
    threads: ThreadPoolExecutor, listening: Listening, source: KvSource, progress: Progress
) -> Future[Sent]:
    """A send that has one chunk out and waits for the next."""
    progress.advance(4)
    return threads.submit(send, listening.port, manifest_for(expected()), source, progress)
