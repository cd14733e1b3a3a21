"""How the bytes of a batch are reached, copied and digested. For encoder and decoder alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from xxhash import xxh3_64, xxh3_64_intdigest

from shared.errors import InvariantBroken
from shared.kv.batch import BATCH_BYTES, Batch, cut
from shared.kv.block_views import BlockViews
from shared.kv.layout import BlobLayout
from shared.kv.manifest import Chunk
from shared.kv.one_pass import OnePass
from shared.kv.pool_memory import Rows, as_rows
from shared.kv.source import KvSink, KvSource

# So much KV is not read before other things have taken its place in the caches: it is copied past them.
_PAST_CACHES_BYTES = 1024 * 1024


class ChunkBytes:
    """One chunk's rows in a source or sink, by batch; `digests` of its tensors as batches are digested in order.

    `scattered`: they are cheaper to copy as a batch than to view one by one. in_pool: the source or sink itself if
    it lies in a block pool, where rows of many tensors are copied in one call, and digested in the same pass where
    the compiled code takes them.
    """

    def __init__(self, memory: KvSource | KvSink, layout: BlobLayout, chunk: Chunk) -> None:
        self.digests: list[int] = []
        self.in_pool = memory if isinstance(memory, BlockViews) else None
        self.scattered = self.in_pool is not None and self.in_pool.is_scattered(*chunk)
        self.chunk = chunk
        self._memory = memory
        self._tensors = layout.tensors
        self.row_bytes = layout.row_bytes
        self._state: xxh3_64 | None = None
        self._one_pass: OnePass | None = None
        if self.in_pool is not None:
            tensor_bytes = (chunk[1] - chunk[0]) * layout.row_bytes
            past_caches = layout.kv_bytes >= _PAST_CACHES_BYTES
            self._one_pass = OnePass(self.in_pool, chunk, tensor_bytes, past_caches=past_caches)

    def batches(self, max_bytes: int = BATCH_BYTES) -> Iterator[Batch]:
        """All of it."""
        return cut(self.chunk, len(self._tensors), self.row_bytes, max_bytes)

    def views(self, batch: Batch) -> Sequence[Sequence[memoryview]]:
        """The bytes of each tensor where they lie. Raises InvariantBroken if they are not of its size."""
        start, end = self.chunk
        row = self.row_bytes
        if self.in_pool is not None:
            return self.in_pool.tensor_views(batch.tensors, batch.start, batch.end)
        of, whole = self._memory.views, (batch.start, batch.end) == self.chunk
        nbytes, found = (batch.end - batch.start) * row, []
        for layer, kind in self._tensors[batch.tensors]:
            own = of(layer, kind, start, end)
            if not whole:
                own = _between(own, (batch.start - start) * row, (batch.end - start) * row)
            if sum(map(len, own)) != nbytes:
                raise InvariantBroken("the views of a tensor are not of its size")
            found.append(own)
        return found

    def copy_out(self, batch: Batch, into: memoryview) -> None:
        """Copy a batch to one buffer of its length."""
        if self.in_pool is not None:
            self.in_pool.copy_out(batch.tensors, batch.start, batch.end, as_rows(into, batch.num_tensors))
            return
        at = 0
        for own in self.views(batch):
            for view in own:
                end = at + len(view)
                into[at:end] = view
                at = end

    def take_out(self, batch: Batch, into: memoryview) -> None:
        """The same, and digest it."""
        if self._one_pass is None or not self._digested(self._one_pass.copy_out(batch, into)):
            self.copy_out(batch, into)
            self.digest_copy(batch, into)

    def copy_in(self, batch: Batch, content: memoryview) -> None:
        """Copy a batch from one buffer of its length to where it belongs, and digest it.

        In two passes what is digested is the buffer, afterwards: it is in the caches.
        """
        if self.in_pool is not None and self._one_pass is not None:
            if not self._digested(self._one_pass.copy_in(batch, content)):
                rows = as_rows(content, batch.num_tensors)
                self.in_pool.copy_in(batch.tensors, batch.start, batch.end, rows)
                self.digest_copy(batch, content)
            return
        at = 0
        views = self.views(batch)
        for own in views:
            for view in own:
                end = at + len(view)
                view[:] = content[at:end]
                at = end
        self.digest(batch, views)

    def look_up(self, source: BlockViews, origin: int) -> None:
        """Work out what `copy_from` will want, before there is KV. origin: position 0 of `source` here."""
        start, end = self.chunk
        source.look_up(start - origin, end - origin)
        if self._one_pass is not None:
            self._one_pass.look_up(source, origin)

    def look_up_buffer(self) -> None:
        """Work out what `copy_in` will want."""
        if self._one_pass is not None:
            self._one_pass.look_up_buffer()

    def copy_from(self, batch: Batch, source: BlockViews, origin: int, scratch: Scratch) -> None:
        """Copy a batch from a peer's pool, and digest what was copied. After `look_up`."""
        if self._one_pass is not None and self._digested(self._one_pass.copy_from(batch, source)):
            return
        start, end = batch.start - origin, batch.end - origin
        rows = source.adjacent_rows(batch.tensors, start, end)
        if rows is not None and self.in_pool is not None and not self.scattered:
            self.in_pool.copy_in(batch.tensors, batch.start, batch.end, rows)
            # Where it was read it is in the caches. Afterwards, so that a block which the peer has given to another
            # sequence meanwhile is found out: it does not change back that soon.
            self._digest_rows(batch, rows)
            return
        memory = scratch.take(batch.num_bytes)
        source.copy_out(batch.tensors, start, end, as_rows(memory, batch.num_tensors))
        self.copy_in(batch, memory)

    def digest(self, batch: Batch, views: Sequence[Sequence[memoryview]] | None = None) -> None:
        """Digest a batch where it lies. views: its own, if they are at hand."""
        pool = self.in_pool
        rows = pool.adjacent_rows(batch.tensors, batch.start, batch.end) if pool is not None else None
        if rows is not None:
            self._digest_rows(batch, rows)
            return
        views = views or self.views(batch)
        if (batch.start, batch.end) == self.chunk:
            self.digests += map(_digest_of, views)
        else:
            self._go_on(batch, chain.from_iterable(views))

    def digest_left(self, batch: Batch, scratch: Scratch, *, through_caches: bool) -> None:
        """Digest a batch that stays where it lies. through_caches: leave it there for a peer that shares them."""
        if through_caches and not self.scattered:
            self.digest(batch)
            return
        digests = self._one_pass.digest(batch, through_caches=through_caches) if self._one_pass else None
        if self._digested(digests):
            return
        if self.scattered:
            self.take_out(batch, scratch.take(batch.num_bytes))
        else:
            self.digest(batch)

    def digest_copy(self, batch: Batch, copy: memoryview) -> None:
        """Digest a batch that lies in one buffer."""
        self._digest_rows(batch, as_rows(copy, batch.num_tensors))

    def _digested(self, digests: list[int] | None) -> bool:
        """Whether one pass has done it all."""
        self.digests += digests or ()
        return digests is not None

    def _digest_rows(self, batch: Batch, rows: Rows) -> None:
        """A tensor in one piece needs no state of its own: setting one up costs as much as digesting 30 KB."""
        if (batch.start, batch.end) == self.chunk:
            self.digests += map(xxh3_64_intdigest, rows)
        else:
            self._go_on(batch, (row.data for row in rows))

    def _go_on(self, batch: Batch, pieces: Iterable[memoryview]) -> None:
        """With the digest of one tensor, of which a batch has some rows."""
        if self._state is None:
            self._state = xxh3_64()
        for piece in pieces:
            self._state.update(piece)
        if batch.end == self.chunk[1]:
            self.digests.append(self._state.intdigest())
            self._state = None


def _digest_of(views: Sequence[memoryview]) -> int:
    if len(views) == 1:
        return xxh3_64_intdigest(views[0])
    state = xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()


def _between(views: Sequence[memoryview], begin: int, end: int) -> list[memoryview]:
    """Bytes [begin, end) of what the views are together."""
    taken = []
    for view in views:
        if begin < len(view) and end > 0:
            taken.append(view[max(0, begin) : end])
        begin -= len(view)
        end -= len(view)
    return taken


class Scratch:
    """A buffer for copies on the way, made when first needed and kept for the next transfer."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        """Its first `num_bytes`; what was taken before is overwritten."""
        if len(self._memory) < num_bytes:
            self._memory = memoryview(bytearray(max(num_bytes, BATCH_BYTES)))
        return self._memory[:num_bytes]
