"""Reservations: blocks of the pool that wait for KV, and the fence around them.

A reservation is in one of these states; every change is made under its lock:

    OPEN ──claim──> CLAIMED ──commit──> COMMITTED        KV is injected; at `release` the engine goes on
      ^                │
      └────release─────┘  (the PUT failed; another prefill worker may try)

    any ──close──> GONE   cancelled, expired, finished: later claims and commits are 410 and write nothing

While it is claimed, the receiver writes into the blocks; so `close` tells the receiver to stop and waits until it
has, and only then may the blocks be freed.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from enum import Enum
from functools import partial

from shared.engine.engine import Engine
from shared.engine.sequence import Group
from shared.errors import HandoffError, ManifestMismatch, ReservationGone
from shared.kv.book import Received
from shared.kv.manifest import Expected
from shared.kv.source import KvSink
from shared.kv.ticket import Ticket


class _State(Enum):
    OPEN = "open"
    CLAIMED = "claimed"
    COMMITTED = "committed"
    GONE = "gone"


class Reservation:
    """One request's place for KV. Made on the event loop; claimed and filled by a receiver's thread.

    engine: goes on when KV has come. None for a probe: KV is checked and dropped, nobody decodes from it or finds
    it, and the reservation is open again.
    """

    def __init__(
        self, expected: Expected, sink: KvSink, group: Group, engine: Engine | None, vocab_size: int
    ) -> None:
        self.expected = expected
        self.sink = sink
        self.received: Received | None = None
        self._group = group
        self._engine = engine
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._state = _State.OPEN
        self._abort: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._released: asyncio.Future[None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether no KV has come, and none is on its way."""
        with self._lock:
            return self._state is _State.OPEN and self.received is None

    def claim(self) -> Claim:
        """Start an attempt to fill it. Raises ReservationGone, or HandoffError while another attempt runs."""
        with self._lock:
            if self._state is _State.CLAIMED:
                raise HandoffError("another transfer to this reservation is under way", retry_after_s=1.0)
            if self._state is not _State.OPEN:
                raise ReservationGone(f"the reservation is {self._state.value}")
            self._state = _State.CLAIMED
        return Claim(self)

    async def close(self) -> None:
        """End it; returns when nobody writes into its blocks any more."""
        with self._lock:
            if self._state is _State.CLAIMED:
                self._released = self._loop.create_future()
            self._state = _State.GONE
            abort = self._abort
        if abort is not None:
            abort()
        if self._released is not None:
            await self._released

    def _attach(self, abort: Callable[[], None]) -> None:
        with self._lock:
            self._abort = abort
            is_gone = self._state is _State.GONE
        if is_gone:
            abort()

    def _commit(self, received: Received) -> Callable[[], None]:
        """Returns what remains to be done when the attempt is over: to tell the engine."""
        tokens, finished = received.first.token_ids, received.first.finished
        if any(not 0 <= token < self._vocab_size for token in tokens):
            raise ManifestMismatch("a first token is outside the vocabulary")
        with self._lock:
            if self._state is not _State.CLAIMED:
                raise ReservationGone("the reservation was cancelled")
            self.received = received
            self._abort = None  # nothing is written any more
            if self._engine is None:
                self._state = _State.OPEN
                return lambda: None
            self._state = _State.COMMITTED
        going_on = {
            choice: token
            for choice, token, ended in zip(self._group.choices, tokens, finished, strict=True)
            if not ended
        }
        is_exact = received.kv_wire is None or not received.kv_bytes
        return partial(self._engine.received, self._group, going_on, is_exact=is_exact)

    def _give_up(self) -> None:
        """An attempt has failed."""
        with self._lock:
            self._abort = None
            if self._state is _State.CLAIMED:
                self._state = _State.OPEN
            released = self._released
        if released is not None:
            self._loop.call_soon_threadsafe(released.set_result, None)


class Claim:
    """One attempt (shared.kv.book.Claim)."""

    def __init__(self, reservation: Reservation) -> None:
        self._reservation = reservation
        self._at_release: Callable[[], None] = reservation._give_up

    @property
    def expected(self) -> Expected:
        return self._reservation.expected

    @property
    def sink(self) -> KvSink:
        return self._reservation.sink

    def attach(self, abort: Callable[[], None]) -> None:
        self._reservation._attach(abort)

    def commit(self, received: Received) -> None:
        self._at_release = self._reservation._commit(received)

    def release(self) -> None:
        self._at_release()


class Book:
    """All reservations of this worker by id (shared.kv.book.ReceiveBook)."""

    def __init__(self, boot: str, clock: Callable[[], float]) -> None:
        self._boot = boot
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, Reservation] = {}
        self._epoch = 0

    def next_identity(self) -> tuple[str, int]:
        """A handoff id and an epoch that no other reservation has or will have."""
        with self._lock:
            self._epoch += 1
            return f"kv-{secrets.token_hex(12)}", self._epoch

    def add(self, reservation: Reservation) -> None:
        """From now on it can be claimed."""
        with self._lock:
            self._open[reservation.expected.handoff_id] = reservation

    async def close(self, reservation: Reservation) -> None:
        """Fence it off; returns when its blocks may be freed."""
        with self._lock:
            self._open.pop(reservation.expected.handoff_id, None)
        await reservation.close()

    def claim(self, ticket: Ticket) -> Claim:
        """See shared.kv.book.ReceiveBook. Raises ReservationGone or HandoffError."""
        ticket.check_issuer(boot=self._boot, now=self._clock())
        with self._lock:
            reservation = self._open.get(ticket.handoff_id)
        if reservation is None or reservation.expected.epoch != ticket.epoch:
            raise ReservationGone("the reservation is gone")
        return reservation.claim()

    def __len__(self) -> int:
        return len(self._open)
