"""A chunk cut into batches of pieces, and how the bytes of a piece are reached. For encoder and decoder alike.

The cut depends on layout and batch size alone, so that two sides that agree on the size agree on every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shared.kv.layout import KvPart
from shared.kv.source import KvSink, KvSource, Scattered

# One system call, or one slot of a segment, carries a batch. Views of a batch stay below IOV_MAX (1024).
BATCH_BYTES = 512 * 1024
BATCH_PIECES = 256


class Piece(NamedTuple):
    """Rows [start, end), positions of the sequence, of the `tensor`-th tensor of a chunk."""

    tensor: int
    part: KvPart
    start: int
    end: int


def cut(
    parts: Sequence[KvPart],
    row_bytes: int,
    max_bytes: int = BATCH_BYTES,
    max_pieces: int | None = BATCH_PIECES,
) -> Iterator[list[Piece]]:
    """The chunk's bytes in file order, in batches of whole rows of at most `max_bytes` (but at least one row).

    Without `max_pieces` every batch but the last is as full as rows can make it.
    """
    max_rows = max(1, max_bytes // row_bytes)
    batch: list[Piece] = []
    room = max_rows
    for index, part in enumerate(parts):
        start = part.start
        while start < part.end:
            end = min(part.end, start + room)
            batch.append(Piece(index, part, start, end))
            room -= end - start
            start = end
            if not room or len(batch) == max_pieces:
                yield batch
                batch, room = [], max_rows
    if batch:
        yield batch


class ChunkBytes:
    """One chunk's rows in a source or sink, by piece.

    `scattered`: use `copy_out` and `copy_in`. Else `views` are few, and copying is left to whoever wants it.
    """

    def __init__(self, memory: KvSource | KvSink, start: int, end: int, row_bytes: int) -> None:
        self._memory = memory
        self._row_bytes = row_bytes
        self._copier = memory if isinstance(memory, Scattered) and memory.is_scattered(start, end) else None
        self.scattered = self._copier is not None

    def nbytes(self, piece: Piece) -> int:
        """Length of a piece in bytes."""
        return (piece.end - piece.start) * self._row_bytes

    def views(self, piece: Piece) -> list[memoryview]:
        """The bytes of a piece where they lie."""
        part = piece.part
        views = self._memory.views(part.layer, part.kind, part.start, part.end)
        if (piece.start, piece.end) == (part.start, part.end):
            return list(views)
        begin, end = ((at - part.start) * self._row_bytes for at in (piece.start, piece.end))
        return _between(views, begin, end)

    def copy_out(self, piece: Piece, into: memoryview) -> None:
        """Copy a piece's bytes to one buffer of its length."""
        part = piece.part
        if self._copier is not None:
            self._copier.copy_out(part.layer, part.kind, piece.start, piece.end, into)
            return
        at = 0
        for view in self.views(piece):
            into[at : at + len(view)] = view
            at += len(view)

    def copy_in(self, piece: Piece, content: memoryview) -> None:
        """Copy a piece's bytes from one buffer of its length."""
        part = piece.part
        if self._copier is not None:
            self._copier.copy_in(part.layer, part.kind, piece.start, piece.end, content)
            return
        at = 0
        for view in self.views(piece):
            view[:] = content[at : at + len(view)]
            at += len(view)


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
