"""NIXL, the receiving side: the chunks of a PUT are read from the pool of the prefill worker that sends it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from shared.errors import InvalidRequest, ManifestMismatch, TransportFailed
from shared.kv.block_views import block_runs
from shared.kv.carrier import Body
from shared.kv.decoder import Section
from shared.kv.layout import BlobLayout
from shared.kv.manifest import Chunk
from shared.kv.pieces import Batch, cut
from shared.kv.transports.base import TransportUnavailable
from shared.kv.transports.nixl_agent import Ranges, Read, ReadFailed
from shared.kv.transports.nixl_peers import NUM_SLOTS, SLOT_BYTES, Landing, NixlPeers
from shared.kv.transports.nixl_wire import BLOCK, NAME, Introduction, Terms, pack_notice, unpack_blocks

_SHORTEST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.001
# A read that follows a notice waits for the peer to have taken it.
_BATCHES_A_NOTICE = 64


class NixlCarrier:
    """What is kept of one connection (shared.kv.carrier.Carrier)."""

    name = NAME

    def __init__(self, peers: NixlPeers, terms: Terms) -> None:
        self.terms = terms
        self.bases: tuple[int, ...] = ()
        self.read_bytes = 0
        self.begun: deque[Read] = deque()
        self.landing: Landing | None = None
        self._peers = peers
        self._peer = ""
        self._is_broken = False

    def next_put(self, terms: Terms) -> None:
        """Raises InvalidRequest if the connection's terms change."""
        if (terms.block_size, terms.token) != (self.terms.block_size, self.terms.token):
            raise InvalidRequest("a connection keeps its terms")
        self.terms = terms

    def slots(self, body: Body) -> NixlSlots:
        """For one PUT."""
        return NixlSlots(self, body)

    def introduce(self, content: bytearray) -> None:
        """Get to know the peer. Raises InvalidRequest, TransportFailed."""
        if self.landing is not None:
            raise InvalidRequest("a peer introduces itself once")
        introduction = Introduction.unpack(content)
        try:
            self._peer, self.landing = self._peers.take(introduction.metadata)
        except (ReadFailed, TransportUnavailable) as exc:
            raise TransportFailed(f"KV cannot be read over NIXL: {exc}") from exc
        self.bases = introduction.bases

    def begin(self, local: Ranges, remote: Ranges) -> None:
        """Begin to read a batch. Raises ReadFailed."""
        self.begun.append(self._peers.agent.read(self._peer, local, remote))

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
            self._peers.give_back(self._peer, landing, self.begun, is_broken=self._is_broken)


class NixlSlots:
    """The chunks of one PUT (shared.kv.decoder.Slots)."""

    def __init__(self, carrier: NixlCarrier, body: Body) -> None:
        self._carrier = carrier
        self._body = body
        self._terms = carrier.terms

    def body_bytes(self, header_bytes: int, layout: BlobLayout) -> int:
        """Header, introduction, blocks and trailer. Raises ManifestMismatch for rows that no slot can hold."""
        if layout.row_bytes > SLOT_BYTES:
            raise ManifestMismatch("a slot is smaller than one row of KV")
        return self._terms.body_bytes(header_bytes, layout)

    def begin(self) -> None:
        """Read the introduction, which the first PUT has even if nothing is to be read.

        Raises InvalidRequest, TransportFailed; TimeoutError, Interrupted, OSError.
        """
        if num_bytes := self._terms.introduction_bytes:
            self._carrier.introduce(self._body.read(num_bytes, Section(num_bytes)))
        if self._carrier.landing is None:
            raise InvalidRequest("a peer introduces itself before it names blocks")

    def chunk(self, layout: BlobLayout, chunk: Chunk) -> Generator[tuple[Batch, memoryview]]:
        """Batches as they have been read: one after the other, or several at once if that takes time.

        Raises InvalidRequest, ManifestMismatch; TransportFailed; TimeoutError, Interrupted, OSError.
        """
        row_bytes, num_tensors = layout.row_bytes, len(layout.tensors)
        section = Section((chunk[1] - chunk[0]) * row_bytes * num_tensors)
        carrier, landing = self._carrier, self._carrier.landing
        assert landing is not None
        if len(carrier.bases) != num_tensors:
            raise ManifestMismatch("the pool has not the layers that the manifest implies")
        source = _Source(carrier.bases, self._terms, self._read_blocks(chunk, section), chunk, row_bytes)
        batches = list(cut(chunk, num_tensors, row_bytes, SLOT_BYTES))
        num_begun = 0
        for position, batch in enumerate(batches):
            pause_s = _SHORTEST_PAUSE_S
            with self._reading():
                while num_begun <= position or not carrier.begun[0].done():
                    if num_begun < min(len(batches), position + NUM_SLOTS):
                        remote = source.ranges(batches[num_begun])
                        carrier.begin(_packed(remote, landing, num_begun), remote)
                        num_begun += 1
                        continue
                    self._wait(pause_s, section)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            carrier.begun.popleft()
            section.taken_bytes += batch.num_bytes
            carrier.read_bytes += batch.num_bytes
            yield batch, landing.slot(position)[: batch.num_bytes]
            if (position + 1) % _BATCHES_A_NOTICE == 0 or position + 1 == len(batches):
                with self._reading():
                    carrier.tell()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except ReadFailed as exc:
            self._carrier.broken()
            raise TransportFailed(f"KV cannot be read over NIXL: {exc}") from exc

    def _read_blocks(self, chunk: Chunk, section: Section) -> tuple[int, ...]:
        num_blocks = self._terms.num_blocks(*chunk)
        blocks = unpack_blocks(self._body.read(num_blocks * BLOCK.size, section))
        section.taken_bytes += 1  # the chunk has begun
        return blocks

    def _wait(self, pause_s: float, section: Section) -> None:
        if time.monotonic() > self._body.due(section):
            raise TransportFailed("KV did not come over NIXL in its time")
        self._body.stream.pause(pause_s)


class _Source:
    """Where the peer's pool has the rows of one chunk."""

    def __init__(
        self, bases: Sequence[int], terms: Terms, blocks: Sequence[int], chunk: Chunk, row_bytes: int
    ) -> None:
        self._bases = bases
        self._blocks = blocks
        self._block_size = terms.block_size
        self._first = chunk[0] // terms.block_size * terms.block_size
        self._row_bytes = row_bytes
        self._rows: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def ranges(self, batch: Batch) -> Ranges:
        """(address, length, 0) of a batch in file order, neighbouring blocks joined."""
        rows = self._rows_of(batch.start, batch.end)
        bases = self._bases[batch.first : batch.last]
        return np.array([(base + at, length, 0) for base in bases for at, length in rows], dtype=np.uint64)

    def _rows_of(self, start: int, end: int) -> list[tuple[int, int]]:
        """(offset, length) in each layer's K or V."""
        key = (start, end)
        if key not in self._rows:
            runs = block_runs(self._blocks, self._block_size, start - self._first, end - self._first)
            row = self._row_bytes
            self._rows[key] = [(first * row, (last - first) * row) for first, last in runs]
        return self._rows[key]


def _packed(remote: Ranges, landing: Landing, position: int) -> Ranges:
    """Ranges of the same lengths, one after the other in a slot."""
    local = remote.copy()
    ends = np.cumsum(local[:, 1])
    local[:, 0] = np.uint64(landing.address + landing.offset(position)) + ends - local[:, 1]
    return local
