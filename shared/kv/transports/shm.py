"""Shared memory on one host: the receiver maps the sender's pool and copies KV from there to its own, once.

The PUT goes over the Unix socket. The pool's descriptor comes with the first PUT of a connection; in the place of
each chunk the body names its blocks (`shared.kv.in_place`). The sender keeps them until it has the answer.

    X-Handoff-Pool: <regions>x<blocks>x<block size>      PUT body:  header | u32 u32 ... | trailer

For a pool that is not in shared memory there is `shm_ring`.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

from shared.errors import InvalidRequest, ManifestMismatch
from shared.kv import in_place
from shared.kv.block_views import BlockViews
from shared.kv.carrier import Body
from shared.kv.encoder import BlobEncoder
from shared.kv.layout import BlobLayout
from shared.kv.pieces import ChunkBytes, Scratch
from shared.kv.pool_memory import PoolMemory, mapped, shared_memory
from shared.kv.stream import Stream
from shared.kv.ticket import Ticket
from shared.kv.transports import unix
from shared.kv.transports.base import Connection, Interrupting, TransportUnavailable

NAME = "shm"
HEADER = "X-Handoff-Pool"

_TERMS = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,9})x([1-9][0-9]{0,6})")


@dataclass(frozen=True, slots=True)
class Terms:
    """The head's field: how the pool is divided."""

    num_regions: int
    num_blocks: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.num_regions}x{self.num_blocks}x{self.block_size}"

    @classmethod
    def parse(cls, text: str) -> Terms:
        """Read what `str` wrote. Raises InvalidRequest."""
        match = _TERMS.fullmatch(text)
        if match is None:
            raise InvalidRequest(f"{HEADER} cannot be read")
        return cls(*(int(number) for number in match.groups()))

    def body_bytes(self, header_bytes: int, layout: BlobLayout) -> int:
        """Length of the PUT's body."""
        return header_bytes + in_place.body_bytes(layout, self.block_size) + layout.trailer_bytes


class ShmTransport:
    """Sender's side (shared.kv.transports.base.Transport). pool: of all sources. An address is an abstract name."""

    name = NAME
    slower_than_memory = False

    def __init__(self, pool: PoolMemory) -> None:
        self._pool = pool
        self._host_id = unix.host_id()

    def self_test(self) -> None:
        """Hand memory over a socket, and map it."""
        unix.UnixTransport().self_test()
        check_shared_memory()

    def address(self, ticket: Ticket) -> str | None:
        """The issuer's socket, if it is on this host."""
        return ticket.kv_socket if ticket.host_id == self._host_id else None

    def connect(self, address: str, deadline: float, interrupting: Interrupting) -> Connection:
        """To a process of the same user."""
        return PoolConnection(unix.connect(address, deadline, interrupting), self._pool)

    def close(self) -> None:
        """Nothing is left but what connections hold."""


class PoolConnection(Connection):
    """A connection whose chunks the peer copies by itself."""

    def __init__(self, stream: Stream, pool: PoolMemory) -> None:
        super().__init__(stream)
        self._descriptor = pool.descriptor
        self._terms = Terms(len(pool.regions), pool.num_blocks, pool.block_size)

    def head_fields(self) -> Mapping[str, str]:
        """How the pool is divided."""
        return {HEADER: str(self._terms)}

    def body_bytes(self, layout: BlobLayout) -> int:
        """Header, blocks, lengths and trailer."""
        return self._terms.body_bytes(len(layout.header), layout)

    def send_head(self, head: bytes, deadline: float) -> None:
        """The first one takes the pool's descriptor along."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            super().send_head(head, deadline)
        else:
            self.stream.send_descriptors(head, [descriptor], deadline)

    def send_chunk(self, encoder: BlobEncoder, index: int, io_s: float) -> None:
        """Name the chunk's blocks, and its batches as they are computed."""
        for message, _ in in_place.messages(encoder, index):
            self.stream.send_all([message], time.monotonic() + io_s)


class MappedPools:
    """Pools of peers as a listener has mapped them: one mapping for all connections of a peer."""

    def __init__(self) -> None:
        self._mapped: WeakValueDictionary[tuple[int, int, Terms], PoolMemory] = WeakValueDictionary()

    def carrier(self, text: str, descriptors: list[int]) -> PoolCarrier:
        """For a connection. Keeps no descriptor. Raises InvalidRequest."""
        terms = Terms.parse(text)
        if len(descriptors) != 1:
            raise InvalidRequest("a pool is one descriptor")
        status = os.fstat(descriptors[0])
        key = (status.st_dev, status.st_ino, terms)
        pool = self._mapped.get(key)
        if pool is None:
            pool = self._mapped[key] = _pool_of(descriptors[0], terms)
        return PoolCarrier(pool, terms)


class PoolCarrier:
    """Receiver's side of one connection (shared.kv.carrier.Carrier)."""

    name = NAME

    def __init__(self, pool: PoolMemory, terms: Terms) -> None:
        self.terms = terms
        self.pool: PoolMemory | None = pool
        self.scratch = Scratch()

    def next_put(self, text: str) -> None:
        """Raises InvalidRequest if it is another pool."""
        if Terms.parse(text) != self.terms:
            raise InvalidRequest("a connection keeps its pool")

    def slots(self, body: Body) -> PoolSlots:
        """For one PUT."""
        assert self.pool is not None
        return PoolSlots(self.pool, self.terms, self.scratch, body)

    def close(self) -> None:
        """Let the mapping go."""
        self.pool = None


class PoolSlots:
    """The chunks of one PUT (shared.kv.decoder.Slots)."""

    def __init__(self, pool: PoolMemory, terms: Terms, scratch: Scratch, body: Body) -> None:
        self._pool = pool
        self._terms = terms
        self._scratch = scratch
        self._body = body

    def body_bytes(self, header_bytes: int, layout: BlobLayout) -> int:
        """Header, blocks, lengths and trailer. Raises ManifestMismatch for a pool of another shape."""
        terms = self._terms
        region_bytes = terms.num_blocks * terms.block_size * layout.row_bytes
        if (len(layout.tensors), region_bytes) != self._pool.rows.shape:
            raise ManifestMismatch("the pool has not the shape that the manifest implies")
        return terms.body_bytes(header_bytes, layout)

    def begin(self) -> None:
        """Nothing: the pool came with the head."""

    def fill(self, target: ChunkBytes) -> None:
        """Copy batches as the sender tells of them. Raises InvalidRequest, ManifestMismatch."""
        told = in_place.ToldChunk(self._body, target, self._terms.block_size)
        if max(told.blocks) >= self._terms.num_blocks:
            raise ManifestMismatch("the pool has no such block")
        source = BlockViews(self._pool, told.blocks, target.row_bytes)
        for position, batch in enumerate(told.batches):
            told.wait(position)
            target.copy_from(batch, source, told.origin, self._scratch)


def check_shared_memory() -> None:
    """Raises TransportUnavailable if a process cannot let another read its memory."""
    try:
        content, descriptor = shared_memory(4096)
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with left, right:
            content[:4] = b"seen"
            socket.send_fds(left, [b"x"], [descriptor])
            os.close(descriptor)
            _, (descriptor, *_), _, _ = socket.recv_fds(right, 1, 1)
            try:
                if mapped(descriptor)[:4] != b"seen":
                    raise TransportUnavailable("what was written is not what was read")
            finally:
                os.close(descriptor)
    except (OSError, AttributeError, ValueError, InvalidRequest) as exc:
        raise TransportUnavailable(f"shared memory does not work here: {exc}") from exc


def _pool_of(descriptor: int, terms: Terms) -> PoolMemory:
    content = mapped(descriptor)
    num_bytes = len(content)
    if num_bytes % terms.num_regions:
        raise InvalidRequest("the pool has not the size that it should have")
    return PoolMemory(content, terms.num_regions, terms.num_blocks, terms.block_size)
