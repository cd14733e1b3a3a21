"""Pool to wire: the blob as lists of buffers for `sendmsg`, or poured into slots; digested on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shared.errors import InvariantBroken
from shared.kv.batch import Batch
from shared.kv.block_views import BlockViews
from shared.kv.layout import BlobLayout
from shared.kv.pieces import ChunkBytes, Scratch
from shared.kv.quant_chunk import QuantChunk
from shared.kv.quant_layout import QuantLayout
from shared.kv.source import KvSource
from shared.kv.trailer import Trailer

Buffer = bytes | memoryview


class BlobEncoder:
    """One blob, front to back: `header`, `chunk(0)`, `chunk(1)`, ..., `trailer`, each once.

    A chunk is sent in batches (`chunk`), poured into memory of a carrier (`pour_chunk`), or left in the pool for a
    peer that reads it there (`blocks`, `leave_chunk`).
    wait: called before KV is read: (chunk, number of its layers that must be in the pool); returns how many are.
    """

    def __init__(
        self,
        layout: BlobLayout,
        source: KvSource,
        scratch: Scratch | None = None,
        wait: Callable[[int, int], int] | None = None,
    ) -> None:
        self._layout = layout
        self._source = source
        self._scratch = scratch or Scratch()
        self._wait = wait
        self._digests: list[int] = []
        self._next_chunk = 0

    def header(self) -> list[Buffer]:
        """Length and JSON. Needs no KV."""
        return [self._layout.header]

    def chunk(self, index: int) -> Iterator[Sequence[Buffer]]:
        """The bytes of one chunk, in batches of bounded size.

        Batches hold views of the source, or of a buffer that the next batch overwrites: send each before the next.
        """
        if isinstance(self._layout, QuantLayout):
            yield from self._quantised_chunk(index, self._layout)
            return
        content = self._begin(index)
        for batch in self._ready(index, content.batches()):
            if content.scattered:
                memory = self._scratch.take(batch.num_bytes)
                content.take_out(batch, memory)
                yield [memory]
            else:
                # Digested before they are read for the wire: a block that changes meanwhile is found out.
                views = content.views(batch)
                content.digest(batch, views)
                yield [view for own in views for view in own]
        self._digests += content.digests

    def _quantised_chunk(self, index: int, layout: QuantLayout) -> Iterator[list[Buffer]]:
        self._count(index)
        content = QuantChunk(self._source, layout, layout.manifest.chunks[index])
        for batch in self._ready(index, content.batches()):
            memory = self._scratch.take(batch.num_bytes)
            content.copy_out(batch, memory)
            yield [memory]
        self._digests += content.digests

    def pour_chunk(self, index: int, slot_bytes: int, next_slot: Callable[[], memoryview]) -> Iterator[int]:
        """Copy one chunk into slots, each when there is one; yields how many bytes are in it."""
        content = self._begin(index)
        for batch in self._ready(index, content.batches(slot_bytes)):
            memory = next_slot()[: batch.num_bytes]
            content.copy_out(batch, memory)
            yield batch.num_bytes
            # The copy is ours alone, so it can be digested while the peer already reads it.
            content.digest_copy(batch, memory)
        self._digests += content.digests

    def blocks(self) -> Sequence[int]:
        """Where the KV lies in the pool, for a peer that reads it there. Raises InvariantBroken if it does not."""
        manifest = self._layout.manifest
        if not manifest.chunks:
            return ()
        return self._in_pool().blocks(manifest.from_token, manifest.num_tokens)

    def leave_chunk(self, index: int, max_bytes: int, *, peer_keeps_up: bool) -> Iterator[list[Batch]]:
        """One chunk that a peer reads from the pool: batches that it may read now, all of them in the end.

        peer_keeps_up: it shares this core's last cache, and reads as fast as this side digests.
        """
        content = self._begin(index)
        for batches in self._ready_together(index, content.batches(max_bytes)):
            yield batches
            # The peer reads meanwhile. A block that changes before both have read it is found out.
            for batch in batches:
                content.digest_left(batch, self._scratch, through_caches=peer_keeps_up)
        self._digests += content.digests

    def trailer(self) -> Trailer:
        """What is left to be sent, all but the first tokens in it."""
        if self._next_chunk != len(self._layout.manifest.chunks):
            raise InvariantBroken("the trailer was asked for before all chunks")
        return Trailer(self._layout, self._digests, self._layout.header)

    def _ready(self, index: int, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Each batch when the layers that it is of are in the pool."""
        for together in self._ready_together(index, batches):
            yield from together

    def _ready_together(self, index: int, batches: Iterator[Batch]) -> Iterator[list[Batch]]:
        """Those that are in the pool, whenever one was waited for."""
        together: list[Batch] = []
        num_layers = 0
        for batch in batches:
            needed = self._layers_of(batch)
            if self._wait is not None and needed > num_layers:
                if together:
                    yield together
                    together = []
                num_layers = self._wait(index, needed)
            together.append(batch)
        yield together

    def _layers_of(self, batch: Batch) -> int:
        """How many layers must have run for it."""
        return self._layout.tensors[batch.last - 1][0] + 1

    def _in_pool(self) -> BlockViews:
        if not isinstance(self._source, BlockViews):
            raise InvariantBroken("the source does not lie in a pool")
        return self._source

    def _begin(self, index: int) -> ChunkBytes:
        self._count(index)
        return ChunkBytes(self._source, self._layout, self._layout.manifest.chunks[index])

    def _count(self, index: int) -> None:
        if index != self._next_chunk:
            raise InvariantBroken(f"chunk {index} was asked for when chunk {self._next_chunk} was next")
        self._next_chunk += 1
