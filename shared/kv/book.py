"""What a decode worker gives a KV transport: reservations to claim, fill and commit. For every transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shared.kv.manifest import Expected
from shared.kv.progress import FirstTokens
from shared.kv.shape import WireFormat
from shared.kv.source import KvSink
from shared.kv.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Received:
    """A verified blob. kv_bytes: K and V, as they are in the pool; wire_bytes: the whole blob, header included.

    kv_wire: how K and V were quantised on the way, if they were.
    """

    first: FirstTokens
    kv_bytes: int
    wire_bytes: int
    kv_wire: WireFormat | None = None


class Claim(Protocol):
    """One attempt to fill a reservation. Used by one thread, but for what `attach` is given.

    The sink's memory belongs to the attempt until `release`: the owner frees or reuses it only after that.
    """

    @property
    def expected(self) -> Expected:
        """What the blob must claim to be, shape included."""
        ...

    @property
    def sink(self) -> KvSink:
        """Where its bytes go."""
        ...

    def attach(self, abort: Callable[[], None]) -> None:
        """Give the owner the way to stop this attempt: thread-safe, returns at once, may be called late.

        Called before the first write. If the reservation is already cancelled, call `abort` right away.
        """
        ...

    def commit(self, received: Received) -> None:
        """Hand the filled memory over; it is the engine's after `release`. May raise ReservationGone."""
        ...

    def release(self) -> None:
        """The attempt is over and writes nothing more. Called exactly once, last, whatever happened.

        After a commit it is now that the engine goes on.
        """
        ...


class ReceiveBook(Protocol):
    """The reservations of one decode worker. Thread-safe."""

    def claim(self, ticket: Ticket) -> Claim:
        """Start an attempt. The ticket's signature is verified; boot, expiry, epoch are the book's to check.

        Raises ReservationGone, or HandoffError (409) while another attempt holds the claim. After an attempt
        that failed the reservation can be claimed again: another prefill worker may retry.
        """
        ...
