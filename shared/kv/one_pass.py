"""One chunk of a block pool, whose tensors are copied and digested in one pass where the compiled code can."""

from __future__ import annotations

from typing import Literal

import numpy as np

from shared.kv.batch import Batch
from shared.kv.block_views import BlockViews
from shared.kv.copy_rows import Moves, Pieces, Place, compiled, move, moves_between
from shared.kv.manifest import Chunk
from shared.kv.pool_memory import address_of

_Way = Literal["in", "out", "digest"]


class OnePass:
    """Each method gives the digests of a batch's tensors, or None if it has done nothing: then it takes two passes.

    Only whole tensors of the chunk, and pieces that the compiled code takes.
    past_caches: where copies to the pool go.
    """

    def __init__(self, pool: BlockViews, chunk: Chunk, *, past_caches: bool) -> None:
        self._copy_rows = compiled()
        self._pool = pool
        self._chunk = chunk
        self._past_caches = past_caches
        self._moves: dict[_Way, Moves | None] = {}
        self._peer_moves: Moves | None = None

    def look_up(self, peer: BlockViews, origin: int) -> None:
        """Work out what `copy_from` will want, before there is KV. origin: position 0 of `peer` here."""
        if self._copy_rows is None:
            return
        start, end = self._chunk
        theirs, own = peer.one_piece(start - origin, end - origin), self._pool.one_piece(start, end)
        if theirs is not None and own is not None:
            self._peer_moves = move(theirs, own)
        else:
            pieces = peer.pieces(start - origin, end - origin)
            self._peer_moves = moves_between(pieces, self._pool.pieces(start, end))

    def look_up_buffer(self) -> None:
        """The same for `copy_in`."""
        if self._copy_rows is not None:
            self._moves["in"] = self._new_moves("in")

    def copy_from(self, batch: Batch, peer: BlockViews) -> list[int] | None:
        """From the pool that was looked up."""
        if self._copy_rows is None or self._peer_moves is None or not self._is_whole(batch):
            return None
        places = peer.place(batch.tensors), self._pool.place(batch.tensors)
        return self._copy_rows(
            *places, batch.num_tensors, self._peer_moves, store_past=self._past_caches, load_past=True
        )

    def copy_in(self, batch: Batch, content: memoryview) -> list[int] | None:
        """From a buffer, which lies in the caches."""
        moves = self._known("in", batch)
        if moves is None or self._copy_rows is None:
            return None
        places = _buffer(batch, content), self._pool.place(batch.tensors)
        return self._copy_rows(*places, batch.num_tensors, moves, store_past=self._past_caches)

    def copy_out(self, batch: Batch, into: memoryview) -> list[int] | None:
        """To a buffer, which lies in the caches."""
        moves = self._known("out", batch)
        if moves is None or self._copy_rows is None:
            return None
        places = self._pool.place(batch.tensors), _buffer(batch, into)
        return self._copy_rows(*places, batch.num_tensors, moves, load_past=True)

    def digest(self, batch: Batch, *, through_caches: bool) -> list[int] | None:
        """Copy nothing. through_caches: leave it there."""
        moves = self._known("digest", batch)
        if moves is None or self._copy_rows is None:
            return None
        place = self._pool.place(batch.tensors)
        return self._copy_rows(place, None, batch.num_tensors, moves, load_past=not through_caches)

    def _is_whole(self, batch: Batch) -> bool:
        return (batch.start, batch.end) == self._chunk

    def _known(self, way: _Way, batch: Batch) -> Moves | None:
        """Worked out once for all batches, which have the same rows."""
        if self._copy_rows is None or not self._is_whole(batch):
            return None
        if way not in self._moves:
            self._moves[way] = self._new_moves(way)
        return self._moves[way]

    def _new_moves(self, way: _Way) -> Moves | None:
        piece = self._pool.one_piece(*self._chunk)
        if piece is not None:
            buffer_piece = (0, piece[1])
            return move(buffer_piece, piece) if way == "in" else move(piece, buffer_piece)
        own = self._pool.pieces(*self._chunk)
        buffer: Pieces = np.array([(0, own[:, 1].sum())], dtype=np.int64)
        source, target = {"in": (buffer, own), "out": (own, buffer), "digest": (own, own)}[way]
        return moves_between(source, target)


def _buffer(batch: Batch, content: memoryview) -> Place:
    return Place(address_of(content)[0], batch.num_tensors, len(content) // batch.num_tensors)
