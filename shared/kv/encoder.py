"""Pool to wire: the blob as lists of buffers for `sendmsg`, or poured into slots; digested on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from xxhash import xxh3_64_intdigest

from shared.errors import InvariantBroken
from shared.kv.layout import BlobLayout
from shared.kv.pieces import ChunkBytes, Digests, Piece, Scratch, cut
from shared.kv.pool_memory import InBlocks
from shared.kv.progress import FirstTokens
from shared.kv.source import KvSource

Buffer = bytes | memoryview


class BlobEncoder:
    """One blob, front to back: `header`, `chunk(0)`, `chunk(1)`, ..., `trailer`, each once.

    A chunk is either sent in batches (`chunk`) or poured into memory of a carrier (`pour_chunk`).
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

    def chunk(self, index: int) -> Iterator[list[Buffer]]:
        """The bytes of one chunk, in batches of bounded size.

        Batches hold views of the source, or of a buffer that the next batch overwrites: send each before the next.
        """
        content, digests = self._begin(index)
        for batch in self._ready(index, cut(self._layout.chunks[index], self._layout.row_bytes)):
            buffers: list[Buffer] = []
            if content.scattered:
                memory = self._scratch.take(content.nbytes(batch))
                content.copy_out(batch, memory, digests)
                buffers.append(memory)
            else:
                for piece in batch:
                    views = content.views(piece)
                    digests.add(piece, views)
                    buffers += views
            yield buffers
        self._digests += digests.values

    def pour_chunk(self, index: int, slot_bytes: int, next_slot: Callable[[], memoryview]) -> Iterator[int]:
        """Copy one chunk into slots, each when there is one; yields how many bytes are in it."""
        content, digests = self._begin(index)
        batches = cut(self._layout.chunks[index], self._layout.row_bytes, slot_bytes, None)
        for batch in self._ready(index, batches):
            num_bytes = content.nbytes(batch)
            content.copy_out(batch, next_slot()[:num_bytes], digests)
            yield num_bytes
        self._digests += digests.values

    def blocks(self, index: int) -> tuple[Sequence[int], int]:
        """Where a chunk lies in the pool, for a peer that reads it there, and its length. `chunk` digests it.

        Raises InvariantBroken if the source's bytes are not in blocks.
        """
        if not isinstance(self._source, InBlocks):
            raise InvariantBroken("the source does not lie in blocks")
        if self._wait is not None:
            self._wait(index, self._layout.manifest.shape.num_layers)
        start, end = self._layout.manifest.chunks[index]
        return self._source.blocks(start, end), sum(part.nbytes for part in self._layout.chunks[index])

    def trailer(self, first: FirstTokens) -> list[Buffer]:
        """First tokens, their flags, and the digests of everything."""
        choices = self._layout.manifest.num_choices
        if self._next_chunk != len(self._layout.chunks):
            raise InvariantBroken("the trailer was asked for before all chunks")
        if len(first.token_ids) != choices or len(first.finished) != choices:
            raise InvariantBroken(f"{len(first.token_ids)} first tokens for {choices} choices")
        tokens = b"".join(token.to_bytes(8, "little", signed=True) for token in first.token_ids)
        flags = bytes(first.finished)
        digests = [
            *self._digests,
            xxh3_64_intdigest(tokens),
            xxh3_64_intdigest(flags),
            xxh3_64_intdigest(self._layout.header),
        ]
        return [tokens + flags + b"".join(digest.to_bytes(8, "little") for digest in digests)]

    def _ready(self, index: int, batches: Iterator[list[Piece]]) -> Iterator[list[Piece]]:
        """Each batch when the layers that it is of are in the pool."""
        num_layers = 0
        for batch in batches:
            needed = batch[-1].part.layer + 1
            if self._wait is not None and needed > num_layers:
                num_layers = self._wait(index, needed)
            yield batch

    def _begin(self, index: int) -> tuple[ChunkBytes, Digests]:
        if index != self._next_chunk:
            raise InvariantBroken(f"chunk {index} was asked for when chunk {self._next_chunk} was next")
        self._next_chunk += 1
        start, end = self._layout.manifest.chunks[index]
        content = ChunkBytes(self._source, start, end, self._layout.row_bytes)
        return content, Digests(len(self._layout.chunks[index]))
