"""NIXL, the receiving side: the chunks of a PUT are read from the pool of the prefill worker that sends it."""

from __future__ import annotations

import time

import numpy as np

from shared.errors import InvalidRequest, ManifestMismatch, TransportFailed
from shared.kv.carrier import Body
from shared.kv.layout import BlobLayout
from shared.kv.manifest import Chunk
from shared.kv.pieces import ChunkBytes
from shared.kv.section import Section, read_section
from shared.kv.told_chunk import ToldChunk, read_blocks
from shared.kv.transports.base import TransportUnavailable
from shared.kv.transports.nixl_agent import Prepared, Ranges, ReadFailed
from shared.kv.transports.nixl_landing import SLOT_BYTES, LandedReads, Landing
from shared.kv.transports.nixl_peers import NixlPeers
from shared.kv.transports.nixl_ranges import Ranged
from shared.kv.transports.nixl_wire import NAME, Introduction, Terms, pack_notice

# A read that follows a notice waits for the peer to have taken it.
_BATCHES_A_NOTICE = 16


class NixlCarrier:
    """What is kept of one connection (shared.kv.carrier.Carrier)."""

    name = NAME

    def __init__(self, peers: NixlPeers | None, secret: bytes, text: str) -> None:
        if peers is None:
            raise InvalidRequest("KV is not read over NIXL here")
        self.terms = Terms.parse(text)
        self.bases = np.zeros(0, dtype=np.uint64)
        self.read_bytes = 0
        self.landing: Landing | None = None
        self._peers = peers
        self._secret = secret
        self._peer = ""
        self._is_broken = False

    def next_put(self, text: str) -> None:
        """Raises InvalidRequest if the connection's terms change."""
        terms = Terms.parse(text)
        if (terms.block_size, terms.token) != (self.terms.block_size, self.terms.token):
            raise InvalidRequest("a connection keeps its terms")
        self.terms = terms

    def slots(self, body: Body) -> NixlSlots:
        """For one PUT."""
        return NixlSlots(self, body)

    def introduce(self, content: bytearray) -> None:
        """Get to know the peer, if it has signed that. Raises InvalidRequest, TransportFailed."""
        if self.landing is not None:
            raise InvalidRequest("a peer introduces itself once")
        introduction = Introduction.unpack(content, self._secret)
        try:
            self._peer, self.landing = self._peers.take(introduction.metadata)
        except (ReadFailed, TransportUnavailable) as exc:
            raise TransportFailed(f"KV cannot be read over NIXL: {exc}") from exc
        self.bases = np.array(introduction.bases, dtype=np.uint64)

    def prepare(self, local: Ranges, remote: Ranges) -> Prepared:
        """For reads of parts of it. Raises ReadFailed."""
        return self._peers.agent.prepare(self._peer, local, remote)

    def tell(self) -> None:
        """How much was read. Raises ReadFailed."""
        self._peers.agent.tell(self._peer, pack_notice(self.terms.token, self.read_bytes))

    def broken(self) -> None:
        """The library cannot reach the peer any more."""
        self._is_broken = True

    def close(self) -> None:
        """Give everything back."""
        landing, self.landing = self.landing, None
        if landing is not None:
            self._peers.give_back(self._peer, landing, is_broken=self._is_broken)


class NixlSlots:
    """The chunks of one PUT (shared.kv.decoder.Slots)."""

    def __init__(self, carrier: NixlCarrier, body: Body) -> None:
        self._carrier = carrier
        self._body = body
        self._terms = carrier.terms
        self._last_chunk: Chunk | None = None
        self._remote: Ranged | None = None

    def body_bytes(self, header_bytes: int, layout: BlobLayout) -> int:
        """Header, introduction, blocks and trailer. Raises ManifestMismatch for rows that no slot can hold."""
        if layout.row_bytes > SLOT_BYTES:
            raise ManifestMismatch("a slot is smaller than one row of KV")
        return self._terms.body_bytes(header_bytes, layout)

    def begin(self, layout: BlobLayout) -> None:
        """Read the introduction, which the first PUT has even if nothing is to be read, and where the KV is.

        Raises InvalidRequest, ManifestMismatch, TransportFailed; TimeoutError, Interrupted, OSError.
        """
        if num_bytes := self._terms.introduction_bytes:
            self._carrier.introduce(read_section(self._body.receive, num_bytes))
        if self._carrier.landing is None:
            raise InvalidRequest("a peer introduces itself before it names blocks")
        bases = self._carrier.bases
        if len(bases) != len(layout.tensors):
            raise ManifestMismatch("the pool has not the layers that the manifest implies")
        told = read_blocks(self._body, layout.manifest, self._terms.block_size)
        self._remote = Ranged(bases, told, layout.row_bytes)
        self._last_chunk = layout.manifest.chunks[-1] if layout.manifest.chunks else None

    def fill(self, target: ChunkBytes) -> None:
        """Batches as the sender tells of them.

        Raises InvalidRequest, ManifestMismatch; TransportFailed; TimeoutError, Interrupted, OSError.
        """
        carrier = self._carrier
        assert carrier.landing is not None
        assert self._remote is not None
        told = ToldChunk(self._body, target)
        target.look_up_buffer()
        landed = LandedReads(carrier.landing, told, self._remote, carrier.prepare)
        num_said = 0
        try:
            landed.look_up()
            for position, batch in enumerate(told.batches):
                num_new = position - num_said
                if num_new == _BATCHES_A_NOTICE or (num_new and not told.can_tell(position)):
                    carrier.tell()
                    num_said = position
                told.wait(position)
                target.copy_in(batch, landed.next(position, self._wait))
                carrier.read_bytes += batch.num_bytes
            # After the last one comes the answer, which says the same.
            if target.chunk != self._last_chunk:
                carrier.tell()
        except ReadFailed as exc:
            carrier.broken()
            raise TransportFailed(f"KV cannot be read over NIXL: {exc}") from exc
        landed.close()

    def _wait(self, section: Section, pause_s: float) -> None:
        if time.monotonic() > self._body.due(section):
            raise TransportFailed("KV did not come over NIXL in its time")
        self._body.stream.pause(pause_s)
