"""Shared memory on one host, the sending side: the receiver maps this side's pool and copies KV from there, once.

The PUT goes over the Unix socket, and the pool's descriptor comes with a connection's first one. The body names the
blocks that hold KV (`shm_wire`); they are kept until there is an answer. For a pool that nobody can map there is
`shm_ring`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence

from shared.errors import ServingError
from shared.kv import told_chunk
from shared.kv.encoder import BlobEncoder, Buffer
from shared.kv.layout import BlobLayout
from shared.kv.pool_memory import PoolMemory
from shared.kv.shared_memory import SharedMemory
from shared.kv.stream import Stream
from shared.kv.ticket import Ticket
from shared.kv.transports import unix
from shared.kv.transports.base import Connection, Interrupting, TransportUnavailable
from shared.kv.transports.shm_reads import map_pool
from shared.kv.transports.shm_wire import HEADER, NAME, Terms

# The receiver does not tell how far it is. Slower than this no memory is copied.
_FLOOR_BYTES_PER_S = 16 * 1024 * 1024


class ShmTransport:
    """See shared.kv.transports.base.Transport. pool: of all sources. An address is an abstract name."""

    name = NAME
    slower_than_memory = False

    def __init__(self, pool: PoolMemory) -> None:
        self._pool = pool
        self._unix = unix.UnixTransport()

    def self_test(self) -> None:
        """Hand memory over a socket, and map it."""
        if self._pool.shared is None:
            raise TransportUnavailable("no peer can map the KV pool")
        self._unix.self_test()
        try:
            _check_shared_memory()
        except (OSError, AttributeError, ValueError, ServingError) as exc:
            raise TransportUnavailable(f"shared memory does not work here: {exc}") from exc

    def address(self, ticket: Ticket) -> str | None:
        """The issuer's socket, if it is on this host."""
        return self._unix.address(ticket)

    def connect(self, address: str, deadline: float, interrupting: Interrupting) -> Connection:
        """To a process of the same user."""
        return PoolConnection(unix.connect(address, deadline, interrupting), self._pool)

    def close(self) -> None:
        """Nothing is left but what connections hold."""


class PoolConnection(Connection):
    """A connection whose chunks the peer copies by itself."""

    def __init__(self, stream: Stream, pool: PoolMemory) -> None:
        super().__init__(stream)
        self._descriptor = pool.shared.descriptor if pool.shared else None
        self._told_bytes = 0
        self._terms = Terms(len(pool.regions), pool.num_blocks, pool.block_size)

    def head_fields(self) -> Mapping[str, str]:
        """How the pool is divided."""
        return {HEADER: str(self._terms)}

    def body_bytes(self, layout: BlobLayout) -> int:
        """Header, blocks, lengths and trailer."""
        return self._terms.body_bytes(len(layout.header), layout)

    def opening(self, encoder: BlobEncoder) -> Sequence[Buffer]:
        """Header and blocks."""
        return [*encoder.header(), told_chunk.blocks_message(encoder)]

    def send_head(self, head: bytes, deadline: float) -> None:
        """The first one takes the pool's descriptor along."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            super().send_head(head, deadline)
        else:
            self.stream.send_descriptors(head, [descriptor], deadline)

    def send_chunk(self, encoder: BlobEncoder, index: int, io_s: float) -> None:
        """Name the chunk's batches as they are computed."""
        for message, num_bytes in told_chunk.messages(encoder, index, peer_keeps_up=True):
            self.stream.send_all([message], time.monotonic() + io_s)
            self._told_bytes += num_bytes

    def await_answer(self, io_s: float) -> float:
        """The receiver may still have everything to copy."""
        told_bytes, self._told_bytes = self._told_bytes, 0
        return io_s + told_bytes / _FLOOR_BYTES_PER_S


def _check_shared_memory() -> None:
    """Raises what does not work, and TransportUnavailable."""
    memory = SharedMemory(4096)
    memory.content[:4] = b"seen"
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        socket.send_fds(left, [b"x"], [memory.descriptor])
        _, descriptors, _, _ = socket.recv_fds(right, 1, 1)
    try:
        if bytes(map_pool(descriptors[0], Terms(1, 1, 1)).regions[0][:4]) != b"seen":
            raise TransportUnavailable("what was written is not what was read")
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
