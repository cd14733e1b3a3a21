"""Shared memory, the receiving side: the pools of prefill workers, mapped to be read, and KV copied from them."""

from __future__ import annotations

import mmap
import os
from weakref import WeakValueDictionary

from shared.errors import InvalidRequest, ManifestMismatch, TransportFailed
from shared.kv.block_views import BlockViews
from shared.kv.carrier import Body
from shared.kv.layout import BlobLayout
from shared.kv.pieces import ChunkBytes, Scratch
from shared.kv.pool_memory import PoolMemory
from shared.kv.shared_memory import check_sealed
from shared.kv.told_chunk import ToldChunk, read_blocks
from shared.kv.transports.shm_wire import NAME, Terms

# numpy counts the bytes of an item, here of a block, in 32 bits.
_MAX_BLOCK_BYTES = 1 << 30


class MappedPools:
    """Pools of peers as a listener has mapped them: one mapping for all connections of a peer."""

    def __init__(self) -> None:
        self._mapped: WeakValueDictionary[tuple[int, int, Terms], PoolMemory] = WeakValueDictionary()

    def carrier(self, text: str, descriptors: list[int]) -> PoolCarrier:
        """For a connection. Keeps no descriptor. Raises InvalidRequest, TransportFailed."""
        terms = Terms.parse(text)
        if not descriptors:
            raise TransportFailed("the pool's descriptor did not arrive")
        if len(descriptors) > 1:
            raise InvalidRequest("a pool is one descriptor")
        status = os.fstat(descriptors[0])
        key = (status.st_dev, status.st_ino, terms)
        pool = self._mapped.get(key)
        if pool is None:
            pool = self._mapped[key] = map_pool(descriptors[0], terms)
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
        if text != str(self.terms):
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
        self._source: BlockViews | None = None
        self._origin = 0

    def body_bytes(self, header_bytes: int, layout: BlobLayout) -> int:
        """Header, blocks, lengths and trailer. Raises ManifestMismatch for a pool of another shape."""
        terms = self._terms
        region_bytes = terms.num_blocks * terms.block_size * layout.row_bytes
        block_bytes = terms.block_size * layout.row_bytes
        if (len(layout.tensors), region_bytes) != self._pool.rows.shape or block_bytes > _MAX_BLOCK_BYTES:
            raise ManifestMismatch("the pool has not the shape that the manifest implies")
        return terms.body_bytes(header_bytes, layout)

    def begin(self, layout: BlobLayout) -> None:
        """Read where the KV is. Raises InvalidRequest, ManifestMismatch."""
        told = read_blocks(self._body, layout.manifest, self._terms.block_size)
        if max(told.blocks, default=0) >= self._terms.num_blocks:
            raise ManifestMismatch("the pool has no such block")
        self._source = BlockViews(self._pool, told.blocks, layout.row_bytes)
        self._origin = told.origin

    def fill(self, target: ChunkBytes) -> None:
        """Copy batches as the sender tells of them. Raises InvalidRequest, ManifestMismatch."""
        assert self._source is not None
        told = ToldChunk(self._body, target)
        target.look_up(self._source, self._origin)
        for position, batch in enumerate(told.batches):
            told.wait(position)
            target.copy_from(batch, self._source, self._origin, self._scratch)


def map_pool(descriptor: int, terms: Terms) -> PoolMemory:
    """Raises InvalidRequest for what is no pool, TransportFailed if this process cannot map it."""
    check_sealed(descriptor)
    num_bytes = os.fstat(descriptor).st_size
    if not num_bytes or num_bytes % terms.num_regions:
        raise InvalidRequest("the pool has not the size that it should have")
    try:
        content = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError as exc:
        raise TransportFailed(f"the pool cannot be mapped: {exc.strerror}") from exc
    return PoolMemory(content, terms.num_regions, terms.num_blocks, terms.block_size)
