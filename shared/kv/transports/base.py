"""What a transport is to the sender of KV. The receiver learns it from the listening socket and the PUT's head."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from shared.kv.encoder import BlobEncoder, Buffer
from shared.kv.layout import BlobLayout
from shared.kv.pieces import Scratch
from shared.kv.stream import Stream
from shared.kv.ticket import Ticket

# Within the block another thread may call the given function (`Stream.interrupt`) to end what blocks.
Interrupting = Callable[[Callable[[], None]], AbstractContextManager[None]]


class TransportUnavailable(Exception):
    """This transport cannot be used here, or not now; the text says why. Another one may do."""


class Connection:
    """An open way to one peer: used by one thread and for one PUT at a time, and kept for the next one.

    This one carries the blob as the PUT's body.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.scratch = Scratch()

    def head_fields(self) -> Mapping[str, str]:
        """What the PUT's head says beside what every PUT says."""
        return {}

    def body_bytes(self, layout: BlobLayout) -> int:
        """Length of the PUT's body. Raises TransportUnavailable for KV that cannot go this way."""
        return layout.total_bytes

    def opening(self, encoder: BlobEncoder) -> Sequence[Buffer]:
        """What of the body needs no KV and follows the head at once."""
        return encoder.header()

    def send_head(self, head: bytes, deadline: float) -> None:
        """Send the PUT's head and the opening."""
        self.stream.send_all([head], deadline)

    def send_chunk(self, encoder: BlobEncoder, index: int, io_s: float) -> None:
        """Send a chunk that is computed. io_s: for the peer to take one batch of it."""
        for batch in encoder.chunk(index):
            self.stream.send_all(batch, time.monotonic() + io_s)

    def await_answer(self, io_s: float) -> float:
        """Wait for what the peer does before it can answer, and tell how long its answer may then take.

        io_s: for each sign of progress, and for the answer.
        """
        return io_s

    def close(self) -> None:
        """Give everything back."""
        self.stream.close()


class Transport(Protocol):
    """One way to send. Thread-safe."""

    @property
    def name(self) -> str:
        """As in a reservation's `transports`, in headers and in metrics."""
        ...

    @property
    def slower_than_memory(self) -> bool:
        """Whether quantising KV can save time on this way."""
        ...

    def self_test(self) -> None:
        """Raises TransportUnavailable if it does not work in this process."""
        ...

    def address(self, ticket: Ticket) -> str | None:
        """Where the ticket's issuer can be reached; None if not by this transport from here."""
        ...

    def connect(self, address: str, deadline: float, interrupting: Interrupting) -> Connection:
        """Raises OSError, TransportUnavailable, and what `interrupting` raises."""
        ...

    def close(self) -> None:
        """Give back what the self-test made. All connections are closed."""
        ...
