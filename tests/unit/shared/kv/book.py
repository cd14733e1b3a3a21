"""A reservation book of one reservation, with events to wait for instead of sleeping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shared.errors import HandoffError, ReservationGone
from shared.kv.block_views import BlockViews
from shared.kv.book import Received
from shared.kv.manifest import Expected
from shared.kv.pool_memory import Rows
from shared.kv.ticket import Ticket
from tests.unit.shared.kv.blobs import Pool

BOOT = "boot1"


class OneReservation:
    """Implements ReceiveBook for one reservation; counts what happened to it.

    on_commit: called in `commit`, may raise.
    """

    def __init__(
        self, want: Expected, pool: Pool, on_commit: Callable[[Received], None] | None = None
    ) -> None:
        self.want = want
        self.pool = pool
        self.on_commit = on_commit
        self.abort: Callable[[], None] | None = None
        self.gone = False
        self.held = False
        self.num_claims = 0
        self.num_releases = 0
        self.committed: list[Received] = []
        self.filled: list[tuple[int, int]] = []
        self.attached = threading.Event()
        self.released = threading.Event()
        self.chunk_arrived = threading.Semaphore(0)

    def claim(self, ticket: Ticket) -> OneClaim:
        ticket.check_issuer(boot=BOOT, now=0.0)
        if self.gone or self.committed:
            raise ReservationGone("the reservation is over")
        if self.held:
            raise HandoffError("the KV of this reservation is already arriving")
        self.held = True
        self.num_claims += 1
        return OneClaim(self)

    def settled(self) -> tuple[int, int]:
        """Claims, and those of them that were released; the last one may be only after its answer."""
        due = time.monotonic() + 10
        while self.num_releases < self.num_claims and time.monotonic() < due:
            time.sleep(0.001)
        return self.num_claims, self.num_releases

    def cancel(self) -> None:
        """What the owner does when the client leaves."""
        self.gone = True
        if self.abort is not None:
            self.abort()


class OneClaim(BlockViews):
    """Implements Claim, and is its sink."""

    def __init__(self, book: OneReservation) -> None:
        super().__init__(book.pool.memory, book.pool.block_table, book.pool.shape.row_bytes)
        self._book = book
        self._has_committed = False
        self.expected = book.want
        self.sink = self

    def attach(self, abort: Callable[[], None]) -> None:
        self._book.abort = abort
        self._book.attached.set()
        if self._book.gone:
            abort()

    def tensor_views(self, tensors: slice, start: int, end: int) -> list[list[memoryview]]:
        assert self._book.held
        return super().tensor_views(tensors, start, end)

    def copy_in(self, tensors: slice, start: int, end: int, content: Rows) -> None:
        assert self._book.held
        super().copy_in(tensors, start, end, content)

    def chunk_filled(self, start: int, end: int) -> None:
        self._book.filled.append((start, end))
        self._book.chunk_arrived.release()

    def commit(self, received: Received) -> None:
        assert self._book.held
        if self._book.on_commit is not None:
            self._book.on_commit(received)
        self._book.committed.append(received)
        self._book.held = False
        self._has_committed = True

    def release(self) -> None:
        if not self._has_committed:
            assert self._book.held
            self._book.held = False
        self._book.num_releases += 1
        self._book.released.set()
