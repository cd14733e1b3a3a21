"""Pool to wire: the blob as lists of buffers for `sendmsg`, digested on the same pass, nothing copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xxhash import xxh3_64, xxh3_64_intdigest

from shared.errors import InvariantBroken
from shared.kv.layout import BlobLayout
from shared.kv.progress import FirstTokens
from shared.kv.source import KvSource

Buffer = bytes | memoryview

# Digest, then send, while the bytes are still in the core's own cache. A batch stays below IOV_MAX (1024).
PIECE_BYTES = 256 * 1024
BATCH_BYTES = 512 * 1024
BATCH_VIEWS = 256


class BlobEncoder:
    """One blob, front to back: `header`, `chunk(0)`, `chunk(1)`, ..., `trailer`, each once.

    Batches hold views of the source: send each before asking for the next.
    """

    def __init__(self, layout: BlobLayout, source: KvSource) -> None:
        self._layout = layout
        self._source = source
        self._digests: list[int] = []
        self._next_chunk = 0

    def header(self) -> list[Buffer]:
        """Length and JSON. Needs no KV."""
        return [self._layout.header]

    def chunk(self, index: int) -> Iterator[list[Buffer]]:
        """The bytes of one chunk, in batches of bounded size. All its positions must be computed."""
        if index != self._next_chunk:
            raise InvariantBroken(f"chunk {index} was asked for when chunk {self._next_chunk} was next")
        self._next_chunk += 1
        batch: list[Buffer] = []
        batch_bytes = 0
        for part in self._layout.chunks[index]:
            digest = xxh3_64()
            views = self._source.views(part.layer, part.kind, part.start, part.end)
            if sum(map(len, views)) != part.span.nbytes:
                raise InvariantBroken(f"the source's views are not the size of {part.span.name}")
            for piece in views if part.span.nbytes <= PIECE_BYTES else _split(views):
                digest.update(piece)
                batch.append(piece)
                batch_bytes += len(piece)
                if batch_bytes >= BATCH_BYTES or len(batch) >= BATCH_VIEWS:
                    yield batch
                    batch, batch_bytes = [], 0
            self._digests.append(digest.intdigest())
        if batch:
            yield batch

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


def _split(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """The same bytes in pieces of at most PIECE_BYTES."""
    for view in views:
        for at in range(0, view.nbytes, PIECE_BYTES):
            yield view[at : at + PIECE_BYTES]
