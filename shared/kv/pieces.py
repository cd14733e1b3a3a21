"""A chunk cut into batches of pieces, and how the bytes of a piece are reached. For encoder and decoder alike.

The cut depends on layout and batch size alone, so that two sides that agree on the size agree on every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from shared.errors import InvariantBroken
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
    for tensor, part in enumerate(parts):
        start, last = part.start, part.end
        while start < last:
            end = last if last - start <= room else start + room
            batch.append(Piece(tensor, part, start, end))
            room -= end - start
            start = end
            if not room or len(batch) == max_pieces:
                yield batch
                batch, room = [], max_rows
    if batch:
        yield batch


class Digests:
    """xxh3_64 of every tensor of a chunk, whose pieces are added in order.

    A tensor in one piece needs no state of its own: setting one up costs as much as digesting 30 KB.
    """

    def __init__(self, num_tensors: int) -> None:
        self.values = [0] * num_tensors
        self._state = xxh3_64()

    def add(self, piece: Piece, views: Sequence[memoryview]) -> None:
        """The bytes of one piece."""
        part = piece.part
        begins, ends = piece.start == part.start, piece.end == part.end
        if begins and ends and len(views) == 1:
            self.values[piece.tensor] = xxh3_64_intdigest(views[0])
            return
        if begins:
            self._state.reset()
        for view in views:
            self._state.update(view)
        if ends:
            self.values[piece.tensor] = self._state.intdigest()


class ChunkBytes:
    """One chunk's rows in a source or sink, by piece.

    `scattered`: they are cheaper to copy as a batch than to view one by one.
    The loops are written out: a short prompt's transfer is nothing but their overhead for each tensor.
    """

    def __init__(self, memory: KvSource | KvSink, start: int, end: int, row_bytes: int) -> None:
        self._memory = memory
        self._row_bytes = row_bytes
        self._copier = memory if isinstance(memory, Scattered) and memory.is_scattered(start, end) else None
        self.scattered = self._copier is not None

    def nbytes(self, batch: list[Piece]) -> int:
        """Length of a batch in bytes."""
        return sum([piece.end - piece.start for piece in batch]) * self._row_bytes

    def views(self, piece: Piece) -> list[memoryview]:
        """The bytes of a piece where they lie. Raises InvariantBroken if they are not of its size."""
        part = piece.part
        row = self._row_bytes
        views = list(self._memory.views(part.layer, part.kind, part.start, part.end))
        if piece.end - piece.start != part.end - part.start:
            views = _between(views, (piece.start - part.start) * row, (piece.end - part.start) * row)
        nbytes = len(views[0]) if len(views) == 1 else sum(map(len, views))
        if nbytes != (piece.end - piece.start) * row:
            raise InvariantBroken(f"the views of {part.name} are not of its size")
        return views

    def copy_out(self, batch: list[Piece], into: memoryview, digests: Digests) -> None:
        """Copy a batch to one buffer of its length, and digest it there, while it is in the core's cache."""
        row, copier = self._row_bytes, self._copier
        at = 0
        for piece in batch:
            end = at + (piece.end - piece.start) * row
            target = into[at:end]
            if copier is not None:
                copier.copy_out(piece.part.layer, piece.part.kind, piece.start, piece.end, target)
            else:
                views = self.views(piece)
                if len(views) == 1:
                    target[:] = views[0]
                else:
                    for view in views:
                        into[at : at + len(view)] = view
                        at += len(view)
            digests.add(piece, [target])
            at = end

    def copy_in(self, batch: list[Piece], content: memoryview, digests: Digests) -> None:
        """Digest a batch in one buffer of its length, and copy it to where it belongs."""
        row, copier = self._row_bytes, self._copier
        at = 0
        for piece in batch:
            end = at + (piece.end - piece.start) * row
            source = content[at:end]
            digests.add(piece, [source])
            if copier is not None:
                copier.copy_in(piece.part.layer, piece.part.kind, piece.start, piece.end, source)
            else:
                views = self.views(piece)
                if len(views) == 1:
                    views[0][:] = source
                else:
                    for view in views:
                        view[:] = content[at : at + len(view)]
                        at += len(view)
            at = end


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
