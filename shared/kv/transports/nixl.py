"""NIXL, the sending side: decode reads KV from prefill's pool, over whatever UCX finds between the two.

The PUT goes over TCP. Its body names the blocks that hold its KV (`nixl_wire`). Prefill
digests a chunk while decode reads it, keeps its blocks until decode has answered, and is told as reads end, so that
a peer that reads nothing any more is noticed. The pool is registered once.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shared.errors import TransportFailed
from shared.kv import told_chunk
from shared.kv.encoder import BlobEncoder, Buffer
from shared.kv.layout import BlobLayout
from shared.kv.pool_memory import PoolMemory
from shared.kv.stream import ReadableWhileSending, Stream
from shared.kv.ticket import Ticket
from shared.kv.transports.base import Connection, Interrupting, TransportUnavailable
from shared.kv.transports.nixl_agent import NixlAgent, Registration
from shared.kv.transports.nixl_notices import Notices
from shared.kv.transports.nixl_wire import HEADER, NAME, TOKEN_BYTES, Introduction, Terms
from shared.kv.transports.tcp import TcpTransport


class NixlTransport:
    """Sender's side (shared.kv.transports.base.Transport). An address is that of the TCP listener.

    pool: what all sources lie in; None if that is not host memory. secret: shared with receivers.
    agent: made by the self-test if not given.
    """

    name = NAME
    slower_than_memory = False

    def __init__(self, pool: PoolMemory | None, secret: bytes, agent: NixlAgent | None = None) -> None:
        self._pool = pool
        self._secret = secret
        self._agent = agent
        self._tcp = TcpTransport()
        self._registered: Registration | None = None
        self._notices: Notices | None = None
        self._introduction = b""

    def self_test(self) -> None:
        """Start the library, let it read something from this process itself, and register the pool."""
        if self._pool is None:
            raise TransportUnavailable("the KV pool does not lie in host memory")
        agent = self._agent or NixlAgent()
        agent.check()
        self._registered = agent.register(self._pool.extent)
        bases = tuple(map(int, self._pool.addresses))
        self._introduction = Introduction(agent.metadata(), bases).pack(self._secret)
        self._notices = Notices(agent)

    def address(self, ticket: Ticket) -> str | None:
        """The authority of the ticket's URL."""
        return self._tcp.address(ticket)

    def connect(self, address: str, deadline: float, interrupting: Interrupting) -> Connection:
        """To the TCP listener; the library connects when decode reads for the first time."""
        if self._notices is None or self._pool is None:
            raise TransportUnavailable("the NIXL transport was not started")
        stream = self._tcp.connect(address, deadline, interrupting).stream
        return NixlConnection(stream, self._pool.block_size, self._introduction, self._notices)

    def close(self) -> None:
        """Stop serving reads. All connections are closed."""
        notices, registered = self._notices, self._registered
        self._notices = self._registered = None
        if notices is not None:
            notices.close()
        if registered is not None:
            # What the library does not let go it holds until this process ends.
            with contextlib.suppress(TransportUnavailable):
                registered.close()


class NixlConnection(Connection):
    """A connection whose chunks the peer reads by itself."""

    def __init__(self, stream: Stream, block_size: int, introduction: bytes, notices: Notices) -> None:
        super().__init__(stream)
        self._introduction = introduction
        self._notices = notices
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._terms = Terms(block_size, len(introduction), self._token)
        self._reading = notices.open(self._token)

    def head_fields(self) -> Mapping[str, str]:
        """Block size, length of the introduction, and token."""
        return {HEADER: str(self._terms)}

    def body_bytes(self, layout: BlobLayout) -> int:
        """Header, introduction, blocks and trailer."""
        return self._terms.body_bytes(len(layout.header), layout)

    def opening(self, encoder: BlobEncoder) -> Sequence[Buffer]:
        """Header, introduction if it is the first one, and blocks."""
        return [*encoder.header(), self._introduction, told_chunk.blocks_message(encoder)]

    def send_head(self, head: bytes, deadline: float) -> None:
        """After the first one the peer is introduced."""
        super().send_head(head, deadline)
        self._introduction = b""
        self._terms = replace(self._terms, introduction_bytes=0)

    def send_chunk(self, encoder: BlobEncoder, index: int, io_s: float) -> None:
        """Name the chunk's batches, and digest it while the peer reads. One chunk at a time is left to be read."""
        self._wait_read(io_s)
        if (failure := self._reading.failure) is not None:
            raise TransportFailed(f"KV cannot be sent over NIXL: {failure}") from failure
        for message, num_bytes in told_chunk.messages(encoder, index, peer_keeps_up=False):
            self._notices.tell(self._reading, num_bytes)
            self.stream.send_all([message], time.monotonic() + io_s)

    def await_answer(self, io_s: float) -> float:
        """The peer may read on for as long as it makes progress, or the library can tell of it."""
        with contextlib.suppress(ReadableWhileSending):
            self._wait_read(io_s)
        self._notices.settle(self._reading)
        return io_s

    def close(self) -> None:
        """Give everything back."""
        super().close()
        self._notices.forget(self._token)

    def _wait_read(self, io_s: float) -> None:
        while self._reading.is_due:
            self.stream.wait_event(self._reading.event, time.monotonic() + io_s)
            self._reading.drain()
