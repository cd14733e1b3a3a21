"""Real sockets for the tests of the transports, and proof that nothing of them is left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from shared.kv.book import ReceiveBook
from shared.kv.limits import ReceiveLimits
from shared.kv.put import PutReport
from shared.kv.receiver import KvListener

SECRET = b"a shared secret"


class Listening:
    """A started listener and the reports of its PUTs."""

    def __init__(self, book: ReceiveBook, limits: ReceiveLimits) -> None:
        self.reports: list[PutReport] = []
        self.reported = threading.Semaphore(0)
        self.listener = KvListener(
            "127.0.0.1",
            0,
            book,
            secret=SECRET,
            limits=limits,
            on_end=self._on_end,
            transports=("shm", "unix"),
        )
        self.listener.start()
        self.port = self.listener.port

    def next_report(self) -> PutReport:
        """Wait for one more PUT to end."""
        assert self.reported.acquire(timeout=10)
        return self.reports[-1]

    def _on_end(self, report: PutReport) -> None:
        self.reports.append(report)
        self.reported.release()


Listen = Callable[..., Listening]


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Start listeners on port 0; all are closed, and all their threads gone, at the end of the test."""
    before = set(threading.enumerate())
    with ExitStack() as stack:

        def start(book: ReceiveBook, limits: ReceiveLimits | None = None) -> Listening:
            listening = Listening(book, limits or ReceiveLimits())
            stack.callback(listening.listener.close)
            return listening

        yield start
    assert before == set(threading.enumerate()) | before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv")]
