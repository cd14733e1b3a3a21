"""Real sockets for the tests of the transports, and proof that nothing of them is left."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from shared.kv.limits import ReceiveLimits
from shared.kv.outgoing import SendTimeouts
from shared.kv.put import PutReport
from shared.kv.receiver import KvListener
from shared.kv.sender import KvSender
from shared.kv.transports.base import Transport
from shared.kv.transports.nixl import NixlTransport
from shared.kv.transports.nixl_agent import NixlAgent
from shared.kv.transports.nixl_peers import NixlPeers
from shared.kv.transports.shm import ShmTransport
from shared.kv.transports.shm_ring import RingTransport, SegmentBudget
from shared.kv.transports.tcp import TcpTransport
from shared.kv.transports.unix import UnixTransport
from tests.unit.shared.kv.blobs import Pool
from tests.unit.shared.kv.book import OneReservation

SECRET = b"a shared secret"


class Listening:
    """A started listener and the reports of its PUTs."""

    def __init__(self, book: OneReservation, limits: ReceiveLimits, nixl: NixlAgent | None) -> None:
        self.reports: list[PutReport] = []
        self.reported = threading.Semaphore(0)
        self.nixl = NixlPeers(nixl) if nixl else None
        self.listener = KvListener(
            "127.0.0.1",
            0,
            book,
            secret=SECRET,
            limits=limits,
            on_end=self._on_end,
            transports=("shm", "unix"),
            nixl=self.nixl,
        )
        self.listener.start()
        self.port = self.listener.port

    def next_report(self) -> PutReport:
        """Wait for one more PUT to end."""
        assert self.reported.acquire(timeout=10)
        return self.reports[-1]

    def at_rest(self) -> None:
        """Wait until all connections wait for another PUT: they do so a moment after their report."""
        due = time.monotonic() + 10
        while True:
            with self.listener._lock:
                serving = self.listener._serving.values()
                if serving and all(served.idle for served in serving):
                    return
            assert time.monotonic() < due
            time.sleep(0.001)

    def _on_end(self, report: PutReport) -> None:
        self.reports.append(report)
        self.reported.release()


Listen = Callable[..., Listening]
SenderOver = Callable[..., KvSender]


@dataclass(frozen=True)
class Agents:
    """Two sides of NIXL in one process, made once: starting one takes most of a second."""

    sending: NixlAgent
    receiving: NixlAgent


@pytest.fixture(scope="session")
def nixl() -> Agents:
    """Skips where the extra is not installed."""
    if importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("the extra handoff[nixl] is not installed")
    return Agents(NixlAgent(), NixlAgent())


@pytest.fixture
def listen(request: pytest.FixtureRequest) -> Iterator[Listen]:
    """Start listeners on port 0; all are closed, and all their threads gone, at the end of the test.

    They offer NIXL too in a test that has asked for it.
    """
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    wanted = "nixl" in request.fixturenames or parameters.get("name") == "nixl"
    agents: Agents | None = request.getfixturevalue("nixl") if wanted else None
    before = set(threading.enumerate())
    with ExitStack() as stack:

        def start(book: OneReservation, limits: ReceiveLimits | None = None) -> Listening:
            listening = Listening(book, limits or ReceiveLimits(), agents.receiving if agents else None)
            stack.callback(listening.listener.close)
            return listening

        yield start
    assert before == set(threading.enumerate()) | before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv")]


@pytest.fixture
def sender_to(name: str, request: pytest.FixtureRequest) -> SenderOver:
    """Makes a sender over the transport in turn, for sources in the given pool. The caller closes it."""

    def make(pool: Pool, timeouts: SendTimeouts | None = None) -> KvSender:
        made: dict[str, Callable[[], Transport]] = {
            "nixl": lambda: NixlTransport(pool.memory, SECRET, request.getfixturevalue("nixl").sending),
            "shm": lambda: ShmTransport(pool.memory),
            "ring": lambda: RingTransport(SegmentBudget(32 << 20)),
            "unix": UnixTransport,
            "tcp": TcpTransport,
        }
        transport = made[name]()
        transport.self_test()
        return KvSender(SECRET, [transport], timeouts or SendTimeouts())

    return make
