"""Shared memory for a pool that no peer can map: chunks are poured into a ring of slots, and copied out of it.

The PUT goes over the Unix socket. Its body is header and trailer as ever, and between them for each batch of a
chunk only its length, as u32, sent when the batch lies in its slot. So all waiting is a read of the socket. The
segment's descriptors come with the first PUT of a connection, whose segment it is from then on.

    PUT body:  header | u32 | u32 | ... | trailer         X-Handoff-Segment: <slots>x<bytes of a slot>
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

from shared.errors import InvalidRequest, ManifestMismatch, TransportFailed
from shared.kv.batch import num_batches
from shared.kv.carrier import Body
from shared.kv.encoder import BlobEncoder
from shared.kv.layout import BlobLayout
from shared.kv.pieces import ChunkBytes
from shared.kv.section import Section, read_section
from shared.kv.segment import Segment, SegmentShape, attach, create
from shared.kv.stream import Stream
from shared.kv.ticket import Ticket
from shared.kv.transports import unix
from shared.kv.transports.base import Connection, Interrupting, TransportUnavailable
from shared.kv.transports.shm_wire import NAME

HEADER = "X-Handoff-Segment"

# A slot is copied in and out while it is in the cores' caches; the ring lets the two sides work at the same time.
SHAPE = SegmentShape(num_slots=8, slot_bytes=512 * 1024)

_NUM_DESCRIPTORS = 2
_LENGTH = struct.Struct("<I")


class SegmentBudget:
    """Bounds the memory of all segments of a process. Thread-safe."""

    def __init__(self, total_bytes: int) -> None:
        self._lock = threading.Lock()
        self._left_bytes = total_bytes

    def take(self, num_bytes: int) -> None:
        """Raises TransportUnavailable if that is too much."""
        with self._lock:
            if num_bytes > self._left_bytes:
                raise TransportUnavailable("all shared memory is in use")
            self._left_bytes -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        """The other end of `take`."""
        with self._lock:
            self._left_bytes += num_bytes


class RingTransport:
    """Sender's side (shared.kv.transports.base.Transport). An address is an abstract name."""

    name = NAME
    slower_than_memory = False

    def __init__(self, budget: SegmentBudget, shape: SegmentShape = SHAPE) -> None:
        self._budget = budget
        self._shape = shape
        self._unix = unix.UnixTransport()

    def self_test(self) -> None:
        """Make a segment, hand it over a socket, map it again, and let the reader say that it is done."""
        self._unix.self_test()
        try:
            self._budget.take(self._shape.nbytes)
        except TransportUnavailable as exc:
            raise TransportUnavailable("less shared memory is allowed than one transfer needs") from exc
        try:
            _check_segment(self._shape)
        except (OSError, AttributeError, ManifestMismatch) as exc:
            raise TransportUnavailable(f"shared memory does not work here: {exc}") from exc
        finally:
            self._budget.give_back(self._shape.nbytes)

    def address(self, ticket: Ticket) -> str | None:
        """The issuer's socket, if it is on this host."""
        return self._unix.address(ticket)

    def connect(self, address: str, deadline: float, interrupting: Interrupting) -> Connection:
        """To a process of the same user, with a new segment."""
        self._budget.take(self._shape.nbytes)
        try:
            stream = unix.connect(address, deadline, interrupting)
        except BaseException:
            self._budget.give_back(self._shape.nbytes)
            raise
        try:
            segment = create(self._shape)
        except OSError as exc:
            stream.close()
            self._budget.give_back(self._shape.nbytes)
            raise TransportUnavailable("there is no shared memory") from exc
        return SegmentConnection(stream, segment, lambda: self._budget.give_back(segment.shape.nbytes))

    def close(self) -> None:
        """Nothing is left but what connections hold."""


class SegmentConnection(Connection):
    """A connection with the segment that it fills."""

    def __init__(self, stream: Stream, segment: Segment, on_close: Callable[[], None]) -> None:
        super().__init__(stream)
        self._segment = segment
        self._on_close = on_close
        self._handed_over = False
        self._num_filled = 0
        self._num_emptied = 0

    def head_fields(self) -> Mapping[str, str]:
        """The segment's shape."""
        return {HEADER: str(self._segment.shape)}

    def body_bytes(self, layout: BlobLayout) -> int:
        """Header, lengths and trailer. Raises TransportUnavailable for rows that no slot can hold."""
        if layout.row_bytes > self._segment.shape.slot_bytes:
            raise TransportUnavailable("a slot is smaller than one row of KV")
        return body_bytes(len(layout.header), layout, self._segment.shape)

    def send_head(self, head: bytes, deadline: float) -> None:
        """The first one takes the segment along."""
        if self._handed_over:
            super().send_head(head, deadline)
            return
        descriptors = (self._segment.memory_fd, self._segment.emptied_fd)
        self.stream.send_descriptors(head, descriptors, deadline)
        self._handed_over = True

    def send_chunk(self, encoder: BlobEncoder, index: int, io_s: float) -> None:
        """Fill slots, and tell of each."""

        def next_slot() -> memoryview:
            while self._num_filled - self._num_emptied == self._segment.shape.num_slots:
                self.stream.wait_event(self._segment.emptied_fd, time.monotonic() + io_s)
                self._num_emptied += os.eventfd_read(self._segment.emptied_fd)
            return self._segment.slot(self._num_filled)

        for num_bytes in encoder.pour_chunk(index, self._segment.shape.slot_bytes, next_slot):
            self._num_filled += 1
            self.stream.send_all([_LENGTH.pack(num_bytes)], time.monotonic() + io_s)

    def close(self) -> None:
        """Give everything back."""
        super().close()
        self._segment.close()
        self._on_close()


class SegmentCarrier:
    """Receiver's side of one connection (shared.kv.carrier.Carrier); its position goes on from PUT to PUT."""

    name = NAME

    def __init__(self, text: str, descriptors: list[int]) -> None:
        self._shape = SegmentShape.parse(text)
        if len(descriptors) < _NUM_DESCRIPTORS:
            raise TransportFailed("the segment's descriptors did not arrive")
        taken, descriptors[:] = descriptors[:], []
        self.segment = attach(taken, self._shape)
        self.num_emptied = 0

    def next_put(self, text: str) -> None:
        """Raises InvalidRequest if it is another segment."""
        if SegmentShape.parse(text) != self._shape:
            raise InvalidRequest("a connection keeps its segment")

    def slots(self, body: Body) -> SegmentSlots:
        """For one PUT."""
        return SegmentSlots(self, body)

    def close(self) -> None:
        """Unmap it."""
        self.segment.close()


class SegmentSlots:
    """The slots of one PUT (shared.kv.decoder.Slots)."""

    def __init__(self, carrier: SegmentCarrier, body: Body) -> None:
        self._carrier = carrier
        self._body = body

    def body_bytes(self, header_bytes: int, layout: BlobLayout) -> int:
        """Header, lengths and trailer. Raises ManifestMismatch for rows that no slot can hold."""
        if layout.row_bytes > self._carrier.segment.shape.slot_bytes:
            raise ManifestMismatch("a slot is smaller than one row of KV")
        return body_bytes(header_bytes, layout, self._carrier.segment.shape)

    def begin(self, layout: BlobLayout) -> None:
        """Nothing: the segment came with the head."""

    def fill(self, target: ChunkBytes) -> None:
        """Batches as the sender fills slots with them. Raises ManifestMismatch."""
        segment = self._carrier.segment
        for batch in target.batches(segment.shape.slot_bytes):
            self._wait_filled(batch.num_bytes)
            target.copy_in(batch, segment.slot(self._carrier.num_emptied)[: batch.num_bytes])
            # Its bytes are where they belong: the sender may fill it again.
            self._carrier.num_emptied += 1
            os.eventfd_write(segment.emptied_fd, 1)

    def _wait_filled(self, num_bytes: int) -> None:
        length = read_section(self._body.receive, _LENGTH.size, Section(num_bytes))
        if _LENGTH.unpack(length)[0] != num_bytes:
            raise ManifestMismatch("a batch has not the length that the manifest implies")


def body_bytes(header_bytes: int, layout: BlobLayout, shape: SegmentShape) -> int:
    """Length of a PUT whose chunks go through a segment."""
    lengths = sum(
        num_batches(chunk, len(layout.tensors), layout.row_bytes, shape.slot_bytes)
        for chunk in layout.manifest.chunks
    )
    return header_bytes + lengths * _LENGTH.size + layout.trailer_bytes


def _check_segment(shape: SegmentShape) -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        segment = create(shape)
        try:
            socket.send_fds(left, [b"x"], [segment.memory_fd, segment.emptied_fd])
            _, descriptors, _, _ = socket.recv_fds(right, 1, _NUM_DESCRIPTORS)
            mapped = attach(descriptors, shape)
            try:
                content = os.urandom(64)
                last = shape.num_slots - 1
                segment.slot(last)[: len(content)] = content
                os.eventfd_write(mapped.emptied_fd, 1)
                if mapped.slot(last)[: len(content)] != content or os.eventfd_read(segment.emptied_fd) != 1:
                    raise ManifestMismatch("what was written is not what was read")
            finally:
                mapped.close()
        finally:
            segment.close()
